"""The cores a process may use, by affinity and the limits of its control groups, and how long it waits for them."""

from pathlib import Path

import pytest

from patchloom.machine import cores, slowdown


@pytest.fixture(autouse=True)
def sixty_four(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(64)))


def test_no_limit(tmp_path: Path) -> None:
    assert cores(tmp_path, tmp_path / "missing") == 64


@pytest.mark.parametrize(
    ("limit", "expected"),
    [("max 100000", 64), ("200000 100000", 2), ("150000 100000", 2), ("1000 100000", 1), ("", 64), ("1 0", 64)],
)
def test_version_2(tmp_path: Path, limit: str, expected: int) -> None:
    (tmp_path / "cpu.max").write_text(limit)
    assert cores(tmp_path, tmp_path / "missing") == expected


@pytest.mark.parametrize("controller", ["cpu", "cpu,cpuacct"])
@pytest.mark.parametrize(("quota", "expected"), [("-1", 64), ("400000", 4)])
def test_version_1(tmp_path: Path, controller: str, quota: str, expected: int) -> None:
    (tmp_path / controller).mkdir()
    (tmp_path / controller / "cpu.cfs_period_us").write_text("100000")
    (tmp_path / controller / "cpu.cfs_quota_us").write_text(quota)
    assert cores(tmp_path, tmp_path / "missing") == expected


def test_the_narrowest_group_above_the_process_counts(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("0::/user.slice/job\n")
    (tmp_path / "user.slice" / "job").mkdir(parents=True)
    (tmp_path / "user.slice" / "job" / "cpu.max").write_text("800000 100000")
    (tmp_path / "user.slice" / "cpu.max").write_text("300000 100000")
    assert cores(tmp_path, own) == 3
    own.write_text("0::/other\n")
    assert cores(tmp_path, own) == 64


def test_version_1_groups_of_other_controllers_do_not_count(tmp_path: Path) -> None:
    own = tmp_path / "own"
    (tmp_path / "cpu" / "job").mkdir(parents=True)
    (tmp_path / "cpu" / "job" / "cpu.cfs_period_us").write_text("100000")
    (tmp_path / "cpu" / "job" / "cpu.cfs_quota_us").write_text("200000")
    for line, expected in (("5:memory:/job", 64), ("4:cpu,cpuacct:/job", 2)):
        own.write_text(f"{line}\n")
        assert cores(tmp_path, own) == expected


def test_affinity_counts_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {3})
    (tmp_path / "cpu.max").write_text("200000 100000")
    assert cores(tmp_path, tmp_path / "missing") == 1


@pytest.mark.parametrize(("text", "expected"), [("200 600 9", 4.0), ("200 0 1", 1.0), ("0 0 0", 1.0), ("odd", 1.0)])
def test_time_spent_waiting_for_a_core_is_a_slowdown(tmp_path: Path, text: str, expected: float) -> None:
    schedule = tmp_path / "schedstat"
    schedule.write_text(text)
    assert slowdown(schedule) == expected


def test_a_system_that_does_not_count_it_has_no_slowdown(tmp_path: Path) -> None:
    assert slowdown(tmp_path / "missing") == 1.0
