"""Whether a run hangs, and who holds it up."""

from __future__ import annotations

import pytest

from lightning_gpuopt.measurements.flight import SAVES, SETS_UP, STARTS, VALIDATES, WAITS
from lightning_gpuopt.postmortem.hangs import UNEVEN_ADVICE, Hang, describe_hang, hang_of
from lightning_gpuopt.postmortem.record import Process
from lightning_gpuopt.postmortem.wording import clock
from tests.postmortem.records import AT_READ, AT_STEP, NOW, rank, worker

SITE = "/venv/lib/python3.12/site-packages"
C10D = f"{SITE}/torch/distributed/distributed_c10d.py"


def quiet(seconds, **known):
    return rank(**({"progress_s": NOW - seconds, "since_s": NOW - seconds} | known))


# seconds without progress, what else is known: the limit of a hang, and None where it is none
LIMITS = {
    "least": (120, {}, 120.0),
    "a-little-less": (119, {}, None),
    "ten-times-the-longest": (200, {"longest_s": 20.0}, 200.0),
    "less-than-ten-times": (199, {"longest_s": 20.0}, None),
    "before-the-first-step": (1800, {"steps": 0, "doing": SETS_UP}, 1800.0),
    "not-yet-before-the-first-step": (1799, {"steps": 0}, None),
    "sanity-check": (1799, {"steps": 0, "doing": VALIDATES}, None),
    "nothing-finished-yet": (0, {"steps": 0, "progress_s": 0.0, "created_s": NOW - 1900}, 1800.0),
    "open-validation-batch": (130, {"doing": VALIDATES}, 120.0),
    "validation-batch-that-began-late": (500, {"doing": VALIDATES, "since_s": NOW - 100}, None),
    "save-that-began-late": (500, {"doing": SAVES, "since_s": NOW - 100}, None),
    "open-save": (500, {"doing": SAVES, "since_s": NOW - 130}, 120.0),
    "set-up-that-began-late": (500, {"doing": SETS_UP, "since_s": NOW - 100}, 120.0),
    "ended-well": (500, {"ended": "ok"}, None),
    "ended-by-an-exception": (500, {"ended": "exception"}, None),
    "the-clock-went-back": (-500, {}, None),
}


@pytest.mark.parametrize(("seconds", "known", "limit_s"), LIMITS.values(), ids=LIMITS)
def test_what_is_a_hang(seconds, known, limit_s):
    found = hang_of([quiet(seconds, **known)], NOW)
    assert (found and found.limit_s) == limit_s


def test_the_rank_that_is_longest_without_progress_is_named():
    ranks = [quiet(200), quiet(300, number=1), quiet(5, number=2), worker(since_s=NOW - 900)]
    assert hang_of(ranks, NOW) == Hang(1, 101, NOW - 300, 300.0, 120.0)
    assert hang_of([], NOW) is None


def stack(*frames):
    """Stacks as faulthandler writes them, innermost first, of a process with another thread."""
    lines = [f'  File "{file}", line {line} in {name}\n' for name, file, line in frames]
    other = 'Thread 0x01 (most recent call first):\n  File "/usr/lib/python3.12/threading.py", line 3 in wait\n\n'
    return f"{other}Thread 0x02 (most recent call first):\n{''.join(lines)}"


STEP = ("training_step", "/home/me/net.py", 14)
READ = ("__getitem__", "/home/me/data.py", 44)
REDUCE = stack(("all_reduce", C10D, 9), STEP)
BACKWARD = stack(("_engine_run_backward", f"{SITE}/torch/autograd/graph.py", 9), STEP)
FETCH = stack(("_try_get_data", f"{SITE}/torch/utils/data/dataloader.py", 9), ("main", "/home/me/train.py", 3))


def described(*records, stacks=None, waits=None):
    return describe_hang(records, stacks or {}, waits or {})


def test_whose_turn_it_was():
    found = described(rank(turn=1), worker(0), worker(1, index="a.jpg"), waits={1001: "futex_do_wait\n", 100: "x"})
    assert (found.process, found.where, found.index) == (Process(0, 1, 1001), AT_READ, "a.jpg")
    assert found.text == (
        f"it was the turn of worker 1 (pid 1001): index a.jpg, at {AT_READ}, in the kernel it waits in futex_do_wait"
    )
    assert found.likely == "a read or a call that does not return: look at the line above"


def test_the_line_is_that_of_the_stacks():
    found = described(rank(turn=0), worker(0), stacks={1000: stack(("sleep", f"{SITE}/x.py", 1), READ)})
    assert found.where == "Photos.__getitem__ (data.py:44)"


def test_where_only_a_library_is_seen_the_users_line_is_where_it_was_before():
    stacks = {1000: stack(("imread", f"{SITE}/cv2.py", 1))}
    assert described(rank(turn=0), worker(0), stacks=stacks).where == AT_READ
    assert described(rank(turn=0), worker(0, place=""), stacks=stacks).where == "imread (cv2.py:1)"


def test_where_the_turn_is_not_known_it_is_the_worker_that_is_busy_for_longest():
    workers = worker(0, since_s=NOW - 5), worker(1, since_s=NOW - 50), worker(2, since_s=NOW - 99, doing=WAITS)
    assert described(rank(), *workers, stacks={100: FETCH}).process == Process(0, 1, 1001)
    assert described(rank(), *workers).process == Process(0, None, 100)  # it waits for no batch


@pytest.mark.parametrize(("doing", "pid"), [("train", 1000), (VALIDATES, 2000)])
def test_the_worker_is_of_the_loader_that_is_read(doing, pid):
    workers = worker(0), worker(0, pid=2000, loader="validation-1")
    assert described(rank(turn=0, doing=doing), *workers).process == Process(0, 0, pid)


def test_a_workers_successor_counts():
    workers = worker(0, created_s=NOW - 9, pid=2000), worker(0, created_s=NOW - 99)
    assert described(rank(turn=0), *workers).process.pid == 2000


def test_without_the_workers_ring_it_is_the_rank():
    found = described(rank(turn=3), worker(0))
    assert (found.process, found.where) == (Process(0, None, 100), AT_STEP)


LOCK = "a lock that was held when it was forked"
NEW = {"batches_read": 0, "fork": True, "doing": "reads", "cpu_s": 0.01}
FUTEX = {1000: "futex_wait_queue"}
IN_CV2 = {1000: stack(("imread", f"{SITE}/cv2/__init__.py", 7), READ)}
# the worker, stacks, wchan: whether it is a lock
LOCKS = {
    "futex": (NEW, {}, FUTEX, True),
    "futex-and-no-cpu-known": (NEW | {"cpu_s": None}, {}, FUTEX, True),
    "futex-in-a-call": (NEW, IN_CV2, FUTEX, True),
    "spawned": (NEW | {"fork": False}, {}, FUTEX, False),
    "has-read": (NEW | {"batches_read": 3}, {}, FUTEX, False),
    "has-used-cpu": (NEW | {"cpu_s": 9.0}, {}, FUTEX, False),
    "reads-a-file": (NEW, IN_CV2, {1000: "folio_wait_bit"}, False),
    "kernel-is-silent-in-a-lock": (
        NEW | {"cpu_s": None},
        {1000: stack(("acquire", "/usr/lib/python3.12/threading.py", 7), READ)},
        {1000: "0"},
        True,
    ),
    "kernel-is-silent-and-no-cpu": (NEW, IN_CV2, {}, True),
    "kernel-is-silent-at-its-start": (NEW | {"doing": STARTS}, {}, {}, True),
    "nothing-is-known": (NEW | {"cpu_s": None}, {}, {}, False),
}


@pytest.mark.parametrize(("known", "stacks", "waits", "is_lock"), LOCKS.values(), ids=LOCKS)
def test_a_lock_that_was_held_in_the_fork(known, stacks, waits, is_lock):
    found = described(rank(turn=0), worker(0, **known), stacks=stacks, waits=waits)
    assert (found.likely.startswith(LOCK), "forkserver" in found.advice) == (is_lock, is_lock), found.likely


def test_the_innermost_frame_of_a_lock():
    found = described(rank(turn=0), worker(0, **NEW), stacks=IN_CV2, waits=FUTEX)
    assert found.likely == f"{LOCK} (innermost frame: imread (cv2/__init__.py:7))"


def test_a_rank_outside_of_the_collective_holds_the_others_up():
    ranks = [rank(each, of=4, place=AT_STEP) for each in range(4)]
    at_s = clock(ranks[0].progress_s)
    found = described(*ranks, stacks={100: BACKWARD, 101: BACKWARD, 102: stack(STEP), 103: BACKWARD})
    assert (found.process, found.where) == (Process(2, None, 102), "Net.training_step (net.py:14)")
    assert found.likely == "the others wait for rank 2"
    assert found.text.splitlines() == [
        f"ranks 0-1 and 3 wait in backward's all_reduce since {at_s}; rank 2 is at Net.training_step (net.py:14) since "
        f"{at_s}",
        "rank 2 (pid 102): at Net.training_step (net.py:14)",
    ]


def test_a_worker_of_the_rank_outside_holds_all_up():
    records = rank(0, of=2), rank(1, of=2, turn=0), worker(0, rank=1), worker(0)
    found = described(*records, stacks={100: REDUCE, 101: FETCH})
    assert (found.process, found.where, found.index) == (Process(1, 0, 1010), AT_READ, 48_213)
    assert "rank 0 waits in all_reduce since" in found.text
    assert "rank 1 waits for a batch of worker 0 since" in found.text


def entries(number, state="started", name="nccl:all_reduce"):
    entry = {"collective_seq_id": number, "state": state, "profiling_name": name}
    return [{"t": NOW, "event": "collective", "entries": [{"collective_seq_id": 0}, entry]}]


def test_a_rank_that_has_not_joined_the_last_collective():
    ranks = rank(0, of=2, events=entries(8)), rank(1, of=2, events=entries(7))
    found = described(*ranks)
    assert found.process == Process(1, None, 101)
    assert "ranks 0-1 wait in all_reduce since" in found.text
    assert "TORCH_NCCL_TRACE_BUFFER_SIZE" in found.advice


def test_a_collective_that_is_done_holds_nobody_up():
    ranks = rank(0, of=2, events=entries(8)), rank(1, of=2, events=entries(8, "completed"))
    assert described(*ranks).process == Process(1, None, 101)


def test_ranks_in_different_collectives():
    barrier = stack(("barrier", C10D, 9), STEP)
    found = described(rank(0, of=2), rank(1, of=2), stacks={100: barrier, 101: REDUCE})
    assert found.likely.startswith("the ranks wait in different collectives")


def test_a_rank_that_has_left_its_epoch():
    early = rank(1, of=2, batch=88, batches=88, doing=SETS_UP)
    found = described(rank(0, of=2, batch=88, batches=100), early, stacks={100: REDUCE, 101: REDUCE})
    assert (found.process, found.advice) == (Process(1, None, 101), UNEVEN_ADVICE)
    assert found.text.startswith("rank 1 ended its epoch 12 batches early; rank 0 waits in all_reduce since ")


def test_one_rank_alone():
    found = described(rank(phase="backward", place=""))
    assert (found.text, found.likely) == ("the training process (pid 100): in backward", "")
    assert described().text == ""
    assert described(worker()).process is None
