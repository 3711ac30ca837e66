"""What is said of failures and of what came after them, over records made by hand."""

from typing import Any

import pandas as pd
import pytest
from factories import (
    DYNAMIC,
    STREAMED,
    make_conditions,
    make_experiment,
    make_failure,
    make_quantized,
    make_record,
    make_spec,
    make_traced,
    make_workload,
)

from offload_eval.analysis.findings import find
from offload_eval.analysis.recovery import explain_recoveries, group_recoveries, recovery_records
from offload_eval.analysis.rules_recovery import check_recovery
from offload_eval.analysis.study import Study
from offload_eval.core.experiment import OffloadedSpec, StaticSpec, StrategySpec
from offload_eval.core.records import Failure, RecoverySample, RunRecord
from offload_eval.core.run_spec import Role
from offload_eval.reporting.recovery_table import RECOVERY_COLUMNS, recovery_frame, render_recoveries
from offload_eval.reporting.report import RECOVERY_TITLE, render_report, write_report

NOWHERE = {"phase": None}
"""Of a worker that is gone."""
LEAKED = ("float32 [2, 2], 16 bytes, held by module.KEPT[0]",)


def make_recovery(**changes: Any) -> RecoverySample:
    """The same worker, back after 2 ms, with nothing left behind and equal bits."""
    base = {"in_new_worker": False, "recovery_s": 0.002, "check_s": 0.05, "leaked_bytes": 0}
    return RecoverySample(**base | {"tokens_equal": True, "logits_equal": True} | changes)


def make_ending(
    role: Role = "oom_prefill",
    status: str = "oom",
    strategy: StrategySpec = STREAMED,
    raised: str = "OutOfMemoryError",
    failed: dict[str, Any] | None = None,
    **recovery: Any,
) -> RunRecord:
    """A failure that ran out of device memory in prefill, unless told otherwise."""
    place = {"stage": "memory", "phase": "prefill", "ledger": "device" if status == "oom" else None}
    failure = Failure(**{"type": raised, "message": "no memory"} | place | (failed or {}))
    return make_record(
        spec=make_spec(strategy, role=role),
        status=status,
        failure=failure,
        trials=(),
        fidelity=None,
        conditions=make_conditions(recovery=make_recovery(**recovery)),
    )


def make_killed(**recovery: Any) -> RunRecord:
    changes = {"in_new_worker": True, "recovery_s": 3.5, "leaked_bytes": None} | recovery
    return make_ending("killed", "failed", raised="WorkerDied", failed=NOWHERE, **changes)


def make_unsupported() -> RunRecord:
    failure = Failure(type="CellUnsupportedError", message="dynamic allocates nothing on the host", stage="memory")
    spec = make_spec(DYNAMIC, role="host_refused")
    return make_record(spec=spec, status="unsupported", failure=failure, trials=(), fidelity=None)


def rows_of(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


class TestSelection:
    def test_drills_and_bad_ends_that_were_followed_up_are_taken_whatever_their_role(self) -> None:
        drills = [make_ending(), make_killed(), make_unsupported()]
        real = [make_ending("fit"), make_ending("cell")]
        left = [
            make_record(),
            make_quantized(conditions=make_conditions(recovery=make_recovery())),
            make_failure("oom", OffloadedSpec()),
            make_failure("timeout", StaticSpec()),
            make_traced(STREAMED),
        ]
        assert recovery_records([*left, *drills, *real]) == (*drills, *real)

    def test_of_a_failure_that_was_retried_the_last_record_counts(self) -> None:
        again = make_ending(recovery_s=0.5)
        assert recovery_records([make_ending(), again]) == (again,)


class TestFindings:
    @pytest.mark.parametrize(
        ("record", "code", "severity", "words"),
        [
            (
                make_ending(tokens_equal=False, logits_equal=False),
                "recovery_tokens",
                "error",
                "device full in prefill",
            ),
            (make_killed(tokens_equal=False, logits_equal=False), "recovery_tokens", "error", "in a new worker"),
            (make_ending(logits_equal=False), "recovery_logits", "note", "the same tokens and other logits"),
            (make_ending(leaked_bytes=16, leaked=LEAKED), "recovery_leak", "warning", LEAKED[0]),
            (
                make_ending(tokens_equal=None, logits_equal=None, message="RuntimeError: lost\ndevice"),
                "recovery_unchecked",
                "warning",
                "RuntimeError: lost device",
            ),
            (
                make_ending(status="failed", raised="ValueError"),
                "drill_missed",
                "warning",
                "as failed, and not as oom",
            ),
            (
                make_ending("hung", "timeout", raised="Timeout", failed={"stage": "load"}),
                "drill_missed",
                "warning",
                "in stage load",
            ),
            (make_ending("hung", "failed", raised="WorkerDied"), "drill_missed", "warning", "not as timeout"),
        ],
    )
    def test_a_planted_fault_is_found_alone(self, record: RunRecord, code: str, severity: str, words: str) -> None:
        (finding,) = check_recovery([make_record(), record])
        assert (finding.code, finding.severity, finding.run_ids) == (code, severity, (record.run_id,))
        assert words in finding.message

    def test_nothing_is_said_of_a_worker_that_came_back_as_it_was(self) -> None:
        fine = [make_ending(), make_killed(), make_unsupported(), make_ending("fit")]
        assert check_recovery(fine) == []

    def test_bytes_within_the_devices_tolerance_have_no_name_and_no_finding(self) -> None:
        assert check_recovery([make_ending(leaked_bytes=512)]) == []

    def test_a_failure_in_a_cell_is_named_in_full_and_its_leak_is_told_once(self) -> None:
        record = make_ending("cell", tokens_equal=False, leaked_bytes=16, leaked=LEAKED)
        conditions = make_conditions(leaked_bytes=16, recovery=record.conditions.recovery)
        found = find([make_record(), make_record(spec=record.spec, **_ended(record, conditions))])
        assert [finding.code for finding in found] == ["recovery_tokens", "out_of_memory", "recovery_leak"]
        assert found[0].message.startswith("small / streamed: after OutOfMemoryError in prefill the same short")

    def test_findings_about_drills_reach_the_reader_under_the_cells_label(self) -> None:
        found = find([make_record(), make_killed(tokens_equal=False)])
        (finding,) = [finding for finding in found if finding.code == "recovery_tokens"]
        assert finding.message.startswith("small / streamed: after a drill (worker killed in decode)")


def _ended(record: RunRecord, conditions: Any) -> dict[str, Any]:
    bad_end = {"status": record.status, "failure": record.failure, "trials": (), "fidelity": None}
    return bad_end | {"conditions": conditions}


class TestTable:
    def test_each_kind_of_failure_has_a_row_under_its_strategy_and_drills_come_first(self) -> None:
        records = [
            make_ending("cell", recovery_s=0.25),
            make_killed(),
            make_unsupported(),
            make_ending("hung", "timeout", raised="Timeout", failed=NOWHERE, in_new_worker=True, recovery_s=75),
        ]
        assert rows_of(render_recoveries(records)) == [
            ["streamed", "drill: worker killed in decode", "1", "WorkerDied", "new", "3.50 s", "-", "yes", "yes"],
            ["streamed", "drill: worker hangs in decode", "1", "Timeout", "new", "0:01:15", "0 B", "yes", "yes"],
            [
                "streamed",
                "real",
                "1",
                "OutOfMemoryError (device memory in prefill)",
                "same",
                "250.0 ms",
                "0 B",
                "yes",
                "yes",
            ],
            [
                "dynamic",
                "drill: host memory refused",
                "1",
                "dynamic allocates nothing on the host",
                *["-"] * 5,
            ],
        ]

    def test_failures_that_were_alike_share_a_row_whatever_the_workload(self) -> None:
        """Times 2, 6 and 4 ms: the median is 4 ms. Two of three were compared, and one of those gave equal logits."""
        records = [
            make_record(
                spec=make_spec(STREAMED, role="fit", workload=make_workload(name=f"b{size}", batch_size=size)),
                **_ended(make_ending("fit"), make_conditions(recovery=recovery)),
            )
            for size, recovery in [
                (2, make_recovery()),
                (4, make_recovery(recovery_s=0.006, logits_equal=False, leaked_bytes=32, leaked=LEAKED)),
                (8, make_recovery(recovery_s=0.004, tokens_equal=None, logits_equal=None)),
            ]
        ]
        (group,) = group_recoveries(explain_recoveries(records))
        assert (group.times, group.num_compared, group.num_tokens_equal, group.num_logits_equal) == (3, 2, 2, 1)
        ((*_, back_after, left, tokens, logits),) = rows_of(render_recoveries(records))
        assert (back_after, left, tokens, logits) == ("4.0 ms, at most 6.0 ms", "32 B", "2 of 2", "1 of 2")
        assert recovery_frame(records)["workload"].tolist() == ["b2", "b4", "b8"]

    def test_another_memory_phase_or_worker_has_another_row(self) -> None:
        records = [
            make_ending("cell"),
            make_ending("fit", failed={"phase": "decode"}),
            make_ending("verify", failed={"ledger": "host"}, raised="MemoryError"),
            make_ending("time", in_new_worker=True),
        ]
        assert len(rows_of(render_recoveries(records))) == 4

    def test_a_drill_that_nobody_followed_up_shows_that_nothing_is_known(self) -> None:
        record = make_ending("killed", "failed", raised="WorkerDied", failed=NOWHERE)
        record = make_record(spec=record.spec, **_ended(record, make_conditions()))
        assert rows_of(render_recoveries([record]))[0][3:] == ["WorkerDied", *["-"] * 5]
        assert check_recovery([record]) == []

    def test_the_frame_holds_raw_values_and_nothing_where_there_is_none(self) -> None:
        frame = recovery_frame([make_ending(leaked_bytes=16, leaked=LEAKED), make_unsupported()])
        assert list(frame.columns) == list(RECOVERY_COLUMNS)
        first, second = frame.to_dict("records")
        assert (first["role"], first["recovery_s"], first["leaked_bytes"]) == ("oom_prefill", 0.002, 16)
        assert (first["tokens_equal"], first["in_new_worker"], first["leaked"]) == (True, False, LEAKED[0])
        assert all(
            pd.isna(second[name]) for name in ("recovery_s", "tokens_equal", "leaked_bytes", "leaked", "ledger")
        )

    def test_without_a_failure_there_is_neither_table_nor_section_nor_file(self, tmp_path: Any) -> None:
        assert render_recoveries([make_record()]) == ""
        assert RECOVERY_TITLE not in render_report(Study(make_experiment(), [make_record()]))
        write_report(tmp_path, Study(make_experiment(), [make_record()]))
        assert not (tmp_path / "tables" / "recovery.csv").exists()

    def test_a_report_has_the_section_and_the_file(self, tmp_path: Any) -> None:
        records = [make_record(), make_ending(), make_killed()]
        write_report(tmp_path, Study(make_experiment(), records))
        assert f"## {RECOVERY_TITLE}" in (tmp_path / "report.md").read_text()
        frame = pd.read_csv(tmp_path / "tables" / "recovery.csv")
        assert frame["role"].tolist() == ["oom_prefill", "killed"]
