"""Break the formulas on purpose, one at a time, and see that the tests notice.

    python scripts/mutations.py            all of them, a table at the end; exits 1 if one survives
    python scripts/mutations.py regression only those with this word in their name

Each mutation replaces one piece of text in a copy of the sources; the fast tests of the folder it is in, or of the one
named, run against the copy and must fail.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent


class Mutation(NamedTuple):
    """One deliberate error."""

    name: str
    file: str
    before: str
    after: str


MUTATIONS = [
    Mutation("sign of the regression", "objective/token_loss.py", "regression_coef * regression -", "-regression_coef * regression -"),
    Mutation("sign of the objective", "objective/token_loss.py", "regression - weighted *", "regression + weighted *"),
    Mutation("no stop-gradient in the regression", "objective/troll.py", "projection.log_probs.detach(),", "projection.log_probs,"),
    Mutation("regression on inactive tokens", "objective/troll.py",
             "at = active.flatten().nonzero()[:, 0]", "at = torch.ones_like(active).flatten().nonzero()[:, 0]"),
    Mutation("regression reversed", "objective/troll.py",
             "[at] for x in (proposal, projected))", "[at] for x in (projected, proposal))"),
    Mutation("ratio of the unprojected policy", "objective/troll.py",
             "log_ratio = projection.log_probs[..., 0]", "log_ratio = projection.proposal[..., 0]"),
    Mutation("GSPO without stop-gradient", "objective/token_loss.py", "value = log_ratio.detach()", "value = log_ratio"),
    Mutation("clip takes the maximum", "objective/baselines.py", "torch.minimum(plain", "torch.maximum(plain"),
    Mutation("sequence mean over all tokens", "objective/aggregation.py", "return lengths.clamp(min=1) if", "return lengths.max() if"),
    Mutation("a controller that runs away", "objective/bound_controllers.py", "self._sign * self.gain", "-self._sign * self.gain"),
    Mutation("a controller that listens to the old policy", "objective/bound_controllers.py", "if self.updates > 1 and", "if"),
    Mutation("a budget that is spent twice", "objective/bounds.py", "left -= np.fmin(taken[t], share)", "left -= 0.5 * np.fmin(taken[t], share)"),
    Mutation("a budget that forgets who does not count", "objective/bounds.py", "np.cumsum(counts, 0) - counts", "np.cumsum(np.ones_like(counts), 0) - 1"),
    Mutation("bounds by entropy without their mean", "objective/bounds.py", "(1 - self.share) * relative", "relative"),
    Mutation("bounds by entropy above their cap", "objective/bounds.py", "bounds.clamp(max=self.highest)", "bounds"),
    Mutation("the mean for the largest completion", "objective/metrics.py", "largest(total, some)", "mean(total, some)"),
    Mutation("KL with the arguments exchanged", "policy/divergence.py",
             "return kl_terms(log_p, log_q).sum(-1)", "return kl_terms(log_q, log_p).sum(-1)"),
    Mutation("KL as the naive sum", "policy/divergence.py",
             "return kl_terms(log_p, log_q).sum(-1)", "return (log_p.exp() * (log_p - log_q)).sum(-1)"),
    Mutation("sampled token not kept", "policy/scoring/reference.py", "torch.cat([sampled[:, None], kept[:, :-1]]", "torch.cat([kept[:, :1], kept[:, :-1]]"),
    Mutation("tail's gradient dropped", "policy/scoring/reference.py", "if tail is not None:\n        outside", "if False:\n        outside"),
    Mutation("tail's gradient dropped on CPUs", "policy/scoring/cpu.py", "(tail - total * log_tail.exp())", "(-total * log_tail.exp())"),
    Mutation("tail as what is missing to 1", "policy/scoring/cpu.py",
             "tail = e.scatter_(-1, hidden(ids), 0.0).sum(-1)", "tail = total[:, 0] - e.gather(-1, hidden(ids)).sum(-1)"),
    Mutation("no logarithm for a tail that underflows", "policy/scoring/cpu.py", "if len(faint):", "if False:"),
    Mutation("tokens behind the last block forgotten", "policy/scoring/cpu.py", "torch.cat([within, behind], dim=-1)", "within"),
    Mutation("blocks in the order of their maxima", "policy/scoring/cpu.py", "k).sort(dim=-1).values", "k)"),
    Mutation("ties to the higher id", "policy/scoring/cpu.py", "torch.arange(z.shape[-1] - 1, -1, -1,", "torch.arange(0, z.shape[-1],"),
    Mutation("minus zero below zero", "policy/scoring/cpu.py", "(z + 0.0).view", "z.contiguous().view"),
    Mutation("entropy of an excluded token", "policy/scoring/cpu.py", "torch.exp(d.clamp_(min=_LOWEST), out=e)", "torch.exp(d, out=e)"),
    Mutation("entropy's gradient without H on CPUs", "policy/scoring/cpu.py", "g.add_(log_tail + entropy)", "g.add_(log_tail)"),
    Mutation("gradient of rows that do not count", "policy/scoring/cpu.py", "            into.zero_()\n", ""),
    Mutation("floor of 1e-6", "policy/align.py", "LOG_FLOOR = -27.631021115928547", "LOG_FLOOR = -13.815510557964274"),
    Mutation("temperature ignored", "policy/scoring/types.py", "return z if self.temperature == 1.0 else z / self.temperature", "return z"),
    Mutation("entropy without gradient", "policy/scoring/reference.py", "if upstream.entropy is not None:", "if False:"),
    Mutation("soft cap without derivative", "policy/scoring/types.py",
             "g = g * (1 - torch.tanh(x.to(g.dtype) * self.scale / self.softcap).square())", "pass"),
    Mutation("every slice of the vocabulary as the first", "policy/head_gradients.py", "first=columns.start", "first=0"),
    Mutation("variance term missing in (7)", "projection/geodesic.py",
             "probs * (g.sum(-1, keepdim=True) + centred * along[:, None])", "probs * g.sum(-1, keepdim=True)"),
    Mutation("sign of the variance term in (7)", "projection/geodesic.py", "+ centred * along", "- centred * along"),
    Mutation("factor t missing in (7)", "projection/geodesic.py", "mix[:, None] * active", "active"),
    Mutation("variance not centred", "projection/geodesic.py", "centred.square()", "d.square()"),
    Mutation("no room for rounding", "projection/ops.py", "slack = 0.5 * torch.finfo(storage).eps", "slack = 0.0 * torch.finfo(storage).eps"),
    Mutation("half the bound", "projection/solvers.py", "kl_bound / here.kl,", "0.5 * kl_bound / here.kl,"),
    Mutation("sequence KL with the weight of the token itself", "diagnostics/sequences.py",
             "before = (log_weight - log_ratio).exp()", "before = log_weight.exp()"),
    Mutation("sequence KL the other way", "diagnostics/sequences.py",
             "token_kl(aligned.old, aligned.proposal)", "token_kl(aligned.proposal, aligned.old)"),
    Mutation("interval without Bessel's correction", "diagnostics/sequences.py", "M / (M - 1) * ", ""),
    Mutation("gradient on log-probabilities as on logits", "diagnostics/gradients.py", "(g - probs * g.sum(-1, keepdim=True))", "g"),
    Mutation("variance under the old policy", "diagnostics/gradients.py", "moments(projection.log_probs[active]", "moments(log_old"),
    Mutation("mismatch the other way", "diagnostics/sequences.py", "log_probs[1] - log_probs[0]", "log_probs[0] - log_probs[1]"),
    Mutation("GRPO with the biased deviation", "advantages/outcome.py", "/ (grouping.sizes - 1)  #", "/ grouping.sizes  #"),
    Mutation("TRL's ratio of the unprojected policy", "trl/passes.py",
             "log_probs = old_log_probs + step.log_ratio", "log_probs = torch.where(counted, proposal.sampled_log_probs, old_log_probs)"),
    Mutation("regression left out of TRL's loss", "trl/trainer.py", "loss = loss + self._regression_coef(inputs)", "loss = loss + 0.0"),
    Mutation("a pull that forgets the advantages", "trl/trainer.py", "else self.region.regression_coef * size", "else self.region.regression_coef"),
    Mutation("old policies of the wrong sequences", "trl/passes.py", "return self.policies", "return self.policies[::-1]"),
    Mutation("TRL's clip left on", "trl/trainer.py", "self.epsilon_low = self.epsilon_high = math.inf", "pass"),
    Mutation("rollout forgotten on resume", "trl/robust/checkpoints.py", "self._buffered_inputs = load_rollout(path, self.accelerator.device)", "pass"),
    Mutation("a rule that looks ahead", "lab/report/rules/history.py", "said=history.ends(i)", "said=history.ends(j)"),
    Mutation("noise taken for a fall", "lab/report/rules/learning.py", "steps * noise(history)) & (best > base)", "0 * noise(history)) & (best > base)"),
    Mutation("one low rollout of two for a fall", "lab/report/rules/learning.py", "SUDDEN_ROLLOUTS, np.max)", "SUDDEN_ROLLOUTS, np.min)"),
    Mutation("a wider bound whatever it is", "lab/report/rules/trust_region.py", "wider if bound < WIDE_BOUND and not far_on_average else None", "wider"),
    Mutation("a wider bound for a mean far outside", "lab/report/rules/trust_region.py", "> max(bound, WIDE_BOUND)", "> math.inf"),
    Mutation("a fall called a plateau", "lab/report/rules/learning.py", "highest(now) - now > FALL * noise(history)", "now < -math.inf"),
    Mutation("too few rollouts called no problem", "lab/report/rules/history.py", "if len(history) < self.rollouts:", "if False:"),
    Mutation("entropy of a solved task", "lab/report/rules/learning.py", "& stalled(history) & ~near_top(history)", "& stalled(history)"),
    Mutation("solved, whatever is left", "lab/report/rules/learning.py", "& (left > LEFT)", "& (left > 1)"),
    Mutation("one rollout enough for a warning", "lab/report/rules/history.py", "np.min) == 1.0", "np.max) == 1.0"),
    Mutation("a warning every time", "lab/report/rules/__init__.py", "self._known.add(finding.name)", "pass"),
]  # fmt: skip


def survives(mutation: Mutation) -> bool:
    """Whether the tests pass on sources with this mutation."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(ROOT / "src", folder, dirs_exist_ok=True)
        path = Path(folder) / "troll" / mutation.file
        text = path.read_text()
        if text.count(mutation.before) != 1:
            raise SystemExit(
                f"{mutation.name}: {mutation.before!r} stands {text.count(mutation.before)} times in {mutation.file}"
            )
        path.write_text(text.replace(mutation.before, mutation.after))
        tests = ROOT / "tests" / mutation.file.split("/")[0]
        run = subprocess.run(
            [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", "not slow", str(tests)],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": folder, "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            text=True,
        )
        failed = [line for line in run.stdout.splitlines() if line.startswith("FAILED")]
        print(
            f"{'SURVIVES' if run.returncode == 0 else 'caught  '} {mutation.name}: {failed[0] if failed else run.stdout[-200:]}",
            flush=True,
        )
        return run.returncode == 0


def main() -> None:
    """Run the chosen mutations."""
    chosen = [m for m in MUTATIONS if all(word in m.name for word in sys.argv[1:])]
    alive = [m.name for m in chosen if survives(m)]
    print(f"{len(chosen) - len(alive)} of {len(chosen)} mutations caught" + (f"; alive: {alive}" if alive else ""))
    sys.exit(bool(alive))


if __name__ == "__main__":
    main()
