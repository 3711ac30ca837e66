"""Experiment files: what is refused and in which words, what is accepted, what a dump keeps."""

import json
import re
from pathlib import Path

import pytest
import yaml
from factories import make_experiment
from hypothesis import given, settings
from hypothesis import strategies as st
from malformed_experiments import GOOD, MALFORMED
from msgspec.structs import replace

from offload_eval.core.experiment import JsonlPrompt, QuantizedSpec, RandomPrompt, TextPrompt
from offload_eval.errors import ExitCode, InputError
from offload_eval.store.experiment_file import dump_experiment, load_experiment, load_resolved_experiment
from offload_eval.store.origin import Override

RANDOM = """\
name: demo
model: {config: config.json, weights: random}
budget: {device_bytes: 1000}
workloads: [{prompt_tokens: 64, output_tokens: 8, prompt: {kind: random}}]
strategies: [{kind: dynamic}]
"""


ALIAS_BOMB = "a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 10)}]\n" for old, new in zip("abcdef", "bcdefg", strict=True)
)


def device_option(device: str | None) -> list[Override]:
    return [] if device is None else [Override(path=("device",), value=device, origin=f"--device {device}")]


def write(folder: Path, text: str | bytes) -> Path:
    path = folder / "demo.yaml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def refusal(path: Path, *overrides: str, device: str | None = None) -> str:
    with pytest.raises(InputError) as caught:
        load_experiment(path, overrides, device_option(device))
    return str(caught.value)


@pytest.mark.parametrize(("old", "new", "fragments"), MALFORMED.values(), ids=MALFORMED.keys())
def test_malformed_file_is_refused_with_file_path_value_and_remedy(
    tmp_path: Path, old: str, new: str, fragments: list[str]
) -> None:
    assert old in GOOD
    (tmp_path / "config.json").write_text("{}")
    path = write(tmp_path, GOOD.replace(old, new, 1))
    message = refusal(path)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    for fragment in fragments:
        assert fragment in message


@pytest.mark.parametrize(
    ("content", "fragment"),
    [
        ("", "is empty; allowed: a mapping with name, question, model"),
        ("- name: demo\n", "is [{'name': 'demo'}]; allowed: a mapping with name"),
        ("just text", "is 'just text'; allowed: a mapping"),
        (b"name: caf\xe9\n", "byte 9 is not UTF-8"),
        ("name: a\x00b", "not valid YAML"),
        ("a: " + "[" * 5000, "nested too deeply"),
        (ALIAS_BOMB, "more than 100000 values"),
    ],
    ids=["empty", "list", "text", "latin-1", "nul", "deep", "alias bomb"],
)
def test_file_that_is_no_mapping_of_text_is_refused(tmp_path: Path, content: str | bytes, fragment: str) -> None:
    assert fragment in refusal(write(tmp_path, content))


def test_missing_file_and_folder_are_refused(tmp_path: Path) -> None:
    assert "missing.yaml: cannot be read: No such file" in refusal(tmp_path / "missing.yaml")
    assert "is not a file; allowed: a file in YAML" in refusal(tmp_path)


def test_input_errors_end_with_the_documented_exit_code(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        load_experiment(tmp_path / "missing.yaml")
    assert caught.value.exit_code == ExitCode.BAD_INPUT == 2


def test_good_file_loads_with_every_default(tmp_path: Path) -> None:
    experiment = load_experiment(write(tmp_path, GOOD))
    assert (experiment.name, experiment.device, experiment.baseline) == ("demo", "auto", "dynamic")
    assert experiment.model.source == "org/model"
    assert [workload.label for workload in experiment.workloads] == ["b2-p64-o8", "long"]
    assert experiment.strategies[1] == QuantizedSpec(backend="hqq", nbits=4)


@pytest.mark.parametrize(
    ("enforce", "plan"),
    [
        ("true", "{trials: 2, memory_trials: 2, transfer_trials: 2}"),
        ("true", "{trials: 1, transfer_trials: 0}"),
        ("false", "{memory_trials: 0, transfer_trials: 0}"),
    ],
)
def test_passes_ride_on_the_rounds_that_are_timed(tmp_path: Path, enforce: str, plan: str) -> None:
    text = GOOD.replace("{device_bytes: 1000}", f"{{device_bytes: 1000, enforce: {enforce}}}\nmeasurement: {plan}")
    assert load_experiment(write(tmp_path, text)).budget.enforce is (enforce == "true")


def test_size_strings_are_bytes(tmp_path: Path) -> None:
    sizes = "{device_bytes: 24 GiB, weights_bytes: 1.5 GB, runtime_bytes: '512', reserve_bytes: 1_000}"
    text = GOOD.replace("{device_bytes: 1000}", sizes) + "cpu: {link_bytes_per_s: 16 GB}\n"
    experiment = load_experiment(write(tmp_path, text))
    budget = experiment.budget
    assert budget.device_bytes == 25_769_803_776
    assert (budget.weights_bytes, budget.runtime_bytes, budget.reserve_bytes) == (1_500_000_000, 512, 1000)
    assert experiment.cpu.link_bytes_per_s == 16_000_000_000


def test_size_strings_are_for_size_fields_only(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD.replace("batch_size: 2", "batch_size: 2 KiB"))
    assert "workloads[0].batch_size: '2 KiB' (text)" in refusal(path)


def test_aliases_and_merge_keys_are_plain_yaml(tmp_path: Path) -> None:
    text = GOOD.replace("- {batch_size: 2,", "- &first {batch_size: 2,").replace(
        "{name: long, prompt_tokens: 512, output_tokens: 8}", "{<<: *first, name: long, prompt_tokens: 512}"
    )
    long = load_experiment(write(tmp_path, text)).workloads[1]
    assert (long.batch_size, long.prompt_tokens, long.output_tokens) == (2, 512, 8)


def test_a_date_is_a_name_like_any_other(tmp_path: Path) -> None:
    assert load_experiment(write(tmp_path, GOOD.replace("name: demo", "name: 2026-01-31"))).name == "2026-01-31"


class TestOverrides:
    @pytest.mark.parametrize("key", ["workloads.0.batch_size", "workloads[0].batch_size"])
    def test_both_index_forms_replace_a_value(self, tmp_path: Path, key: str) -> None:
        experiment = load_experiment(write(tmp_path, GOOD), [f"{key}=16"])
        assert [workload.batch_size for workload in experiment.workloads] == [16, 1]

    def test_the_value_is_yaml_and_a_missing_section_is_created(self, tmp_path: Path) -> None:
        overrides = [
            "measurement.trials=5",
            "cpu={compute_threads: 1}",
            "budget.device_bytes=2 GiB",
            "question=a=b?",
            "budget.enforce=true",
        ]
        experiment = load_experiment(write(tmp_path, GOOD), overrides)
        assert (experiment.measurement.trials, experiment.cpu.compute_threads) == (5, 1)
        assert experiment.budget.device_bytes == 2_147_483_648
        assert (experiment.question, experiment.budget.enforce) == ("a=b?", True)

    def test_the_last_override_wins(self, tmp_path: Path) -> None:
        path = write(tmp_path, GOOD)
        assert load_experiment(path, ["name=one", "name=two"]).name == "two"

    def test_an_aliased_section_changes_in_one_place_only(self, tmp_path: Path) -> None:
        text = RANDOM.replace("config: config.json, weights: random", "source: org/model").replace(
            "[{prompt_tokens: 64, output_tokens: 8, prompt: {kind: random}}]",
            "[{prompt_tokens: 1, output_tokens: 2, prompt: &p {kind: random}}, "
            "{prompt_tokens: 2, output_tokens: 2, prompt: *p}]",
        )
        experiment = load_experiment(write(tmp_path, text), ["workloads.0.prompt.kind=pydoc"])
        assert [type(workload.prompt).__name__ for workload in experiment.workloads] == [
            "PydocPrompt",
            "RandomPrompt",
        ]

    def test_device_replaces_the_files_and_the_overrides_one(self, tmp_path: Path) -> None:
        assert load_experiment(write(tmp_path, GOOD), ["device=cuda"], device_option("cpu")).device == "cpu"

    @pytest.mark.parametrize(
        ("override", "fragments"),
        [
            ("batch_size", ["not an override", "key.path=value"]),
            ("=3", ["not an override"]),
            ("workloads..x=3", ["not an override"]),
            ("workloads[-1].seed=3", ["not an override"]),
            ("workloads.2.seed=3", ["workloads has 2 items; 2 is past its end", "0 to 1"]),
            ("workloads.first.seed=3", ["workloads is a list", "'first' is not an index", "0 to 1"]),
            ("name.first=3", ["name is 'demo', which has no 'first' inside"]),
            ("name=[1", ["name (set by --set name=[1): not valid YAML"]),
            ("workloads.0.batch_size=0", ["workloads[0].batch_size (set by ", "integer from 1 to"]),
            ("workloads.0.batchsize=4", ["workloads[0].batchsize (set by ", "did you mean 'batch_size'"]),
            ("workloads.0={}", ["workloads[0].prompt_tokens (set by ", "required"]),
            ("budget.device_bytes=24 gigs", ["budget.device_bytes (set by ", "'24 gigs'"]),
            ("baseline=streamed", ["baseline (set by ", "is not the label of a strategy"]),
            ("measurement.cell_timeout_s=.inf", ["measurement.cell_timeout_s (set by ", "finite"]),
            ("measurement.trials=0", ["measurement.trials (set by ", "integer from 1 to"]),
            ("measurement.transfer_trials=9", ["measurement.transfer_trials (set by ", "0 to measurement.trials = 3"]),
            ("strategies.1.kind=dynamic", ["strategies[1].backend", "unknown key"]),
            ("workloads.1={batch_size: 2, prompt_tokens: 64, output_tokens: 8}", ["(changed by ", "label"]),
        ],
    )
    def test_a_bad_override_is_named(self, tmp_path: Path, override: str, fragments: list[str]) -> None:
        message = refusal(write(tmp_path, GOOD), override)
        for fragment in fragments:
            assert fragment in message
        if "unknown key" not in fragments:
            assert f"--set {override}" in message

    def test_a_bad_device_names_its_option(self, tmp_path: Path) -> None:
        message = refusal(write(tmp_path, GOOD), device="gpu")
        assert "device (set by --device gpu): 'gpu' (text) is not allowed; allowed: auto, cpu, cuda" in message

    def test_what_no_override_touched_is_not_blamed_on_one(self, tmp_path: Path) -> None:
        path = write(tmp_path, GOOD.replace("batch_size: 2", "batch_size: 0"))
        assert "--set" not in refusal(path, "workloads.1.batch_size=4")


class TestPaths:
    def test_local_paths_become_absolute_from_the_files_folder(self, tmp_path: Path) -> None:
        folder = tmp_path / "experiments"
        folder.mkdir()
        for name in ("config.json", "prompts.txt", "prompts.jsonl"):
            (tmp_path / name).write_text("{}")
        text = GOOD.replace("batch_size: 2", "prompt: {kind: text, path: ../prompts.txt}").replace(
            "name: long", "prompt: {kind: jsonl, path: ../prompts.jsonl, field: body}"
        )
        experiment = load_experiment(write(folder, text))
        assert experiment.workloads[0].prompt == TextPrompt(path=f"{tmp_path}/prompts.txt")
        assert experiment.workloads[1].prompt == JsonlPrompt(path=f"{tmp_path}/prompts.jsonl", field="body")

        experiment = load_experiment(write(folder, RANDOM), ["model.config=../config.json"])
        assert experiment.model.config == f"{tmp_path}/config.json"
        assert experiment.workloads[0].prompt == RandomPrompt()

    def test_a_source_that_exists_beside_the_file_is_local(self, tmp_path: Path) -> None:
        (tmp_path / "org" / "model").mkdir(parents=True)
        text = GOOD.replace(", revision: main", "")
        assert load_experiment(write(tmp_path, text)).model.source == f"{tmp_path}/org/model"

    def test_a_local_source_has_no_revision(self, tmp_path: Path) -> None:
        (tmp_path / "org" / "model").mkdir(parents=True)
        assert "model.revision: 'main' needs a hub id" in refusal(write(tmp_path, GOOD))

    def test_any_other_source_is_a_hub_id(self, tmp_path: Path) -> None:
        assert load_experiment(write(tmp_path, GOOD)).model.source == "org/model"
        assert load_experiment(write(tmp_path, GOOD), ["model.source=gpt2"]).model.source == "gpt2"

    def test_home_is_expanded(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "tiny.gguf").write_bytes(b"")
        monkeypatch.setenv("HOME", str(tmp_path))
        path = write(tmp_path, GOOD.replace(", revision: main", ""))
        assert load_experiment(path, ["model.source='~/tiny.gguf'"]).model.source == f"{tmp_path}/tiny.gguf"

    def test_a_config_folder_needs_a_config_in_it(self, tmp_path: Path) -> None:
        folder = tmp_path / "tiny"
        folder.mkdir()
        path = write(tmp_path, RANDOM.replace("config.json", "tiny"))
        assert "model.config: 'tiny' is a folder without a config.json" in refusal(path)
        (folder / "config.json").write_text("{}")
        assert load_experiment(path).model.config == str(folder)


class TestDump:
    def test_a_dump_loads_back_equal(self, tmp_path: Path) -> None:
        (tmp_path / "prompts.txt").write_text("words")
        text = GOOD.replace("batch_size: 2", "prompt: {kind: text, path: prompts.txt}")
        experiment = load_experiment(write(tmp_path, text), ["measurement.cell_timeout_s=0.1"])
        assert load_experiment(write(tmp_path, dump_experiment(experiment))) == experiment

    def test_a_dump_states_every_default(self, tmp_path: Path) -> None:
        content = yaml.safe_load(dump_experiment(load_experiment(write(tmp_path, GOOD))))
        assert content["measurement"]["trials"] == 3
        assert content["strategies"][0] == {"kind": "dynamic", "name": None}
        assert content["workloads"][1]["prompt"] == {"kind": "pydoc"}

    def test_a_resolved_experiment_is_read_where_its_files_are_gone(self, tmp_path: Path) -> None:
        experiment = make_experiment(model=replace(make_experiment().model, source=f"{tmp_path}/gone"))
        path = write(tmp_path, dump_experiment(experiment))
        assert load_resolved_experiment(path) == experiment
        assert "does not exist" in refusal(path)

    @settings(max_examples=50, deadline=None)
    @given(question=st.text(st.characters(codec="utf-8")), timeout_s=st.floats(1e-300, 1e300))
    def test_any_text_and_number_survive(
        self, tmp_path_factory: pytest.TempPathFactory, question: str, timeout_s: float
    ) -> None:
        plan = replace(make_experiment().measurement, cell_timeout_s=timeout_s)
        experiment = make_experiment(question=question, measurement=plan)
        path = write(tmp_path_factory.mktemp("dump"), dump_experiment(experiment))
        assert load_resolved_experiment(path) == experiment


def test_messages_show_long_values_shortened(tmp_path: Path) -> None:
    message = refusal(write(tmp_path, GOOD), f"device={json.dumps('x' * 5000)}")
    shown = re.search(r"'x+\.\.\.", message)
    assert shown is not None
    assert len(shown[0]) < 100
