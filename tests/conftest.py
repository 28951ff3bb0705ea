"""Settings that must precede imports, which tests are ``core`` and ``slow``, and how ``pytest -n`` shares a machine."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # a test process and what it starts: more only wait for each other

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton reads it when it is imported

ALONE = {  # files that must not run beside each other, by what they share
    "the threads and the processes of one user": ("selftest/", "sandbox/", "test_cli_code", "test_rewards_code"),
    "the cores, which a cluster needs": ("test_cli_verl", "test_verl_main_ppo"),
}


CORE = (  # pytest -m core: the method, its oracles, one TRL update. A file, file::test or file::test[case]
    "advantages/test_advantages_outcome.py",
    "objective/test_objective_aggregation.py",
    "objective/test_objective_baselines.py",
    "objective/test_objective_token_loss.py",
    "objective/test_objective_troll.py",
    "policy/test_policy_divergence.py",
    "policy/test_policy_restrict.py",
    "policy/test_policy_sparse.py",
    "projection/test_projection_gradient.py",
    "projection/test_projection_inputs.py",
    "projection/test_projection_oracle.py",
    "test_same_bits.py",  # without Triton, which is interpreted on a CPU
    "trl/test_trl_training.py::test_the_bound_acts_and_holds[dense-bucket]",
)
SLOW = (  # in addition to the tests with the marker
    "experiments/test_studies_analyse.py",
    "lab/cli/test_cli_eval.py::test_a_model_in_a_process_of_its_own",
    "lab/cli/test_cli_eval.py::test_a_run_before_and_after",
    "lab/cli/test_cli_report.py::test_by_name_and_by_folder_in_a_process_of_its_own",
    "lab/cli/test_cli_train.py::test_a_report_is_written_unless_told_otherwise",
    "lab/models/test_models_embedded.py::test_two_processes_convert_once",
    "lab/models/test_models_names.py::test_a_hub_that_refuses",
    "lab/report/test_report_browser.py",
    "lab/report/test_report_page.py::test_long_runs_stay_small",
    "lab/report/test_report_page.py::test_the_same_folder_gives_the_same_bytes",
    "lab/tasks/test_tasks_gym.py::test_sets_do_not_overlap_and_only_training_depends_on_the_seed",
    "policy/test_policy_compile.py::test_one_graph_gives_the_eager_numbers",
    "rewards/test_rewards_math.py::test_a_batch_with_bombs_has_every_result_in_its_place",
    "test_site.py::test_in_a_browser_from_disk",
    "trl/robust/test_checkpoints_failures.py::test_a_process_that_dies_anywhere_leaves_the_last_good_one",
    "trl/robust/test_trl_interrupt.py::test_a_signal_in_the_middle_of_a_print",
    "trl/test_trl_examples.py::test_gsm8k_reads_files_and_yaml_evaluates_and_clips",
    "trl/test_trl_examples.py::test_lora_trains_an_adapter_and_leaves_the_model_alone",
    "trl/test_trl_examples.py::test_preference_trains_on_a_reward_model_with_a_reference",
    "trl/test_trl_examples.py::test_the_program_runs_without_them_as_plain_TRL",
    "trl/test_trl_learning.py::test_with_a_mistake_it_does_not",
)
SLOW_AFTER_THE_FIRST_CASE = (  # of a parametrised test, the first case stays in -m "not slow"
    "lab/cli/test_cli_interrupt.py",
    "lab/cli/test_cli_resume.py",
    "objective/test_objective_training.py",
    "objective/test_objective_triton.py",
    "policy/test_policy_parallel.py",
    "policy/test_policy_head_gradients.py::test_the_kernels_give_the_same",
    "policy/test_policy_triton.py",
    "policy/test_policy_triton_head.py",
    "projection/test_projection_triton.py",
    "trl/robust/test_checkpoints_exact.py",
    "trl/robust/test_trl_checkpoints.py",
    "trl/robust/test_trl_guards.py",
    "trl/robust/test_trl_resume.py",
    "trl/test_trl_bounds.py",
    "trl/test_trl_equivalence.py",
    "trl/test_trl_features.py",
    "trl/test_trl_learning.py",
    "trl/test_trl_vllm.py",
)
TESTS = Path(__file__).parent


def _named(item: pytest.Item, names: tuple[str, ...]) -> bool:
    """Whether an item is one of these, or in one of these files."""
    file = item.path.relative_to(TESTS).as_posix()
    test = getattr(item, "originalname", item.name)
    return any(name in names for name in (file, f"{file}::{test}", f"{file}::{item.name}"))


def _mark(items: list[pytest.Item]) -> None:
    """Add the markers ``core`` and ``slow`` as the tables say."""
    first: set[str] = set()
    for item in items:
        base = item.nodeid.partition("[")[0]
        later_case = base in first
        first.add(base)
        if _named(item, SLOW) or (later_case and _named(item, SLOW_AFTER_THE_FIRST_CASE)):
            item.add_marker(pytest.mark.slow)
        if _named(item, CORE) and not ("test_same_bits" in base and "triton" in item.name):
            item.add_marker(pytest.mark.core)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """``-m core`` imports no file without such a test: importing all of them takes longer than the tests."""
    if config.option.markexpr != "core" or collection_path.suffix != ".py":
        return None
    file = collection_path.relative_to(TESTS).as_posix() if collection_path.is_relative_to(TESTS) else ""
    return None if file in {name.partition("::")[0] for name in CORE} else True


@pytest.fixture
def hangups() -> Iterator[None]:
    """A closed terminal is heard of, also where the tests are run with nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def together(nodeid: str) -> str:
    """The tests that one process runs, one after the other: those of a file, or of some files."""
    file = nodeid.partition("::")[0]
    return next((name for name, parts in ALONE.items() if any(part in file for part in parts)), file)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests; under ``-n`` long files begin first, so that no process is left with one at the end."""
    _mark(items)
    if hasattr(config, "workerinput"):
        slow = {together(item.nodeid) for item in items if item.get_closest_marker("slow")}
        items.sort(key=lambda item: together(item.nodeid) not in slow)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """The tests of a file share its fixtures, and stay in one process."""
    from xdist.scheduler import LoadScopeScheduling

    class Together(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return together(nodeid)

    config.option.loadscopereorder = False
    return Together(config, log)
