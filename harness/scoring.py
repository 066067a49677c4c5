"""Where a failure is and where a scorer hangs: the place in the user's own code, not in ours or a library's."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import sys
import threading
import traceback
from pathlib import Path

from data import Group, Rollout, Score, Task, TrainingFailed

HOUSE = Path(__file__).resolve().parent.parent
OURS = ("engine", "models", "harness", "sandbox", "tasks",
        "train_grpo.py", "data.py", "rewards.py", "eval.py", "plot_run.py")  # beside them a user's own files may stand


def blame(error: BaseException) -> str:
    """'TypeError: text (my_rewards.py:12)': a failure with the last place in a file that is neither ours nor a
    library's, so in the user's own code, where it went through one."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if is_users(f.filename)]
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{where}"


def is_users(file: str) -> bool:
    """Whether a file is neither Python's nor a library's nor of this project."""
    path = Path(file)
    standard_library = Path(json.__file__).parents[1]
    if not path.is_file() or "site-packages" in path.parts or standard_library in path.parents:
        return False
    if not path.resolve().is_relative_to(HOUSE):
        return True
    first = path.resolve().relative_to(HOUSE).parts[0]
    return first not in OURS


@contextlib.contextmanager
def noticed(seconds: float):
    """Within: a line on stderr every so many seconds that tells where a scorer is, for it may hang."""
    thread, over = threading.get_ident(), threading.Event()

    def tell() -> None:
        for n in itertools.count(1):
            if over.wait(seconds):
                return
            stack = traceback.extract_stack(sys._current_frames()[thread])
            place = next((f for f in reversed(stack) if is_users(f.filename)), stack[-1])
            print(f"scoring has taken {n * seconds:.0f} s, it is at {place.filename}:{place.lineno}; if it hangs, "
                  "Ctrl-C saves the run and a second one ends it", file=sys.stderr, flush=True)

    threading.Thread(target=tell, daemon=True).start()
    try:
        yield
    finally:
        over.set()


def judge(task: Task, rollouts: list[list[Rollout]]) -> list[Group]:
    """Scored groups. A failure is its rollouts' result; the same failure in every one of them raises TrainingFailed."""
    with noticed(60):
        judged = task.score_all(rollouts)
    groups = [judged_group(task, rows, scores) for rows, scores in zip(rollouts, judged, strict=True)]
    reasons = [score.flags.get("unscorable") or score.flags.get("error")
               for group in groups for score in group.scores]
    kinds = {reason and reason.partition(":")[0] for reason in reasons}  # the texts may differ by completion
    if len(kinds) == 1 and None not in kinds:
        raise TrainingFailed(f"scoring failed in the same way for every completion: {reasons[0]}")
    return groups


def judged_group(task: Task, rollouts: list[Rollout], scores: list[Score] | Exception) -> Group:
    """One group with the scores that a task gave it, or with its failure. TrainingFailed where the task breaks the
    interface."""
    if isinstance(scores, Exception):
        scores = [Score.unscorable(blame(scores)) for _ in rollouts]
    if len(scores) != len(rollouts) or not all(isinstance(score, Score) for score in scores):
        raise TrainingFailed(f"{type(task).__name__}.score must return one data.Score for each of {len(rollouts)} "
                             f"rollouts, it returned {str(scores):.100}")
    unknown = {name for score in scores for name in score.parts} - set(task.parts)
    if unknown:
        raise TrainingFailed(f"{type(task).__name__}.score gave the reward part {min(unknown)!r}, which is none of "
                             f"its parts = {task.parts}; name it there")
    return Group(rollouts[0].prompt, rollouts, [finite(score) for score in scores])


def finite(score: Score) -> Score:
    if score.reward is None or math.isfinite(score.reward):
        return score
    return Score.unscorable("the reward is not finite")
