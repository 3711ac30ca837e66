# ruff: noqa: E501 - one row a case
"""`plan` on the command line: text, files that leave out what a run needs, and everything that can be typed wrong."""

import json
from pathlib import Path
from typing import Any, ClassVar

import pytest
import yaml
from malformed_configs import MALFORMED, write
from plan_calls import BASE, BASE_MODEL, CHAT, LONG, ROOT, Configure, cell, invoke, plan


class TestText:
    def test_what_a_strategy_gains_and_what_it_costs(self):
        """153 sessions of offloaded against 12: 12.75; each moves 4,095 tokens in and 4,096 out."""
        text = invoke(*BASE, "--prompt-tokens", "4095", "--output-tokens", "2").stdout
        lines = [" ".join(line.split()) for line in text.splitlines()]
        assert "offloaded 40.00 MiB 512.00 MiB 153 device 12.75x" in lines
        assert "offloaded 511.88 MiB 512.00 MiB 76.48 GiB 76.50 GiB" in lines

    @pytest.mark.parametrize("columns", ["80", "100", "200"])
    def test_no_column_is_lost_in_a_narrow_terminal(
        self, plan_experiment: Configure, columns: str, monkeypatch: pytest.MonkeyPatch
    ):
        monkeypatch.setenv("COLUMNS", columns)
        groups = [CHAT, LONG]
        names = (
            {"kind": "streamed"},
            {"kind": "offloaded_static"},
            {"kind": "quantized", "backend": "quanto", "nbits": 4},
        )
        section = {"population": groups, "host": {"memory_bytes": 2**41}}
        text = invoke(str(plan_experiment(section, strategies=[*names])), "--hardware", "h100-sxm").stdout
        shown = (
            "quantized-quanto-int4 ",
            "streamed ",
            "at most",
            "mixes",
            "pinned host",
            "at the limit",
            "TPOT from (ms)",
        )
        for words in shown:
            assert words in text
        assert "…" not in text
        assert max(map(len, text.splitlines())) <= int(columns)

    def test_the_populations_answer_comes_first(self, tmp_path: Path, plan_config: Configure):
        """2,000,000 // (160 tokens * 512 bytes) = 24."""
        content = {
            "model": {"config": str(plan_config()), "weights": "random"},
            "budget": {"device_bytes": 3_000_000, "weights_bytes": 1_000_000},
            "plan": {"population": [CHAT, LONG], "paging": {"block_tokens": 1}},
        }
        path = tmp_path / "mix.yaml"
        path.write_text(yaml.safe_dump(content))
        first = " ".join(invoke(str(path)).stdout.split())
        assert "the population of 4 sessions fits at most 24 times with paged" in first

    def test_groups_that_are_left_out_are_named(self, plan_experiment: Configure):
        groups = [CHAT, LONG | {"prompt_tokens": 5000}]
        assert "The population, without long: too long" in invoke(str(plan_experiment({"population": groups}))).stdout

    def test_a_budget_that_is_short_says_by_how_much(self):
        text = invoke(*BASE[:4], "--weights-gib", "30", "--prompt-tokens", "4096").stdout
        assert "6.00 GiB short before any KV cache" in text

    def test_concurrency_as_vllm_logs_it(self):
        """6 GiB over 5,000 tokens in blocks of 16: 5,008 * 131,072 bytes."""
        assert "concurrency 9.81x at 5,000 tokens" in invoke(*BASE, "--prompt-tokens", "5000").stdout

    def test_without_a_decode_step_nothing_crosses(self):
        document = plan(*BASE, "--prompt-tokens", "4096", "--output-tokens", "1")
        assert cell(document, "offloaded")["h2d_bytes_per_step"] == 0

    def test_presets_are_listed(self):
        listed = json.loads(invoke("--list-presets", "--json").stdout)
        assert {"preset": "gpt2", "name": "openai-community/gpt2"}.items() <= listed_of(listed, "gpt2").items()
        assert "llama-3.1-8b" in invoke("--list-presets").stdout


def listed_of(listed: list[dict[str, Any]], preset: str) -> dict[str, Any]:
    (found,) = [each for each in listed if each["preset"] == preset]
    return found


class TestFilesForPlan:
    """What only a run needs may be left out."""

    POPULATION: ClassVar[dict[str, Any]] = {"population": [CHAT]}

    def write(self, tmp_path: Path, **content: Any) -> str:
        path = tmp_path / "plan.yaml"
        path.write_text(yaml.safe_dump(content))
        return str(path)

    def test_a_population_alone_is_enough(self, tmp_path: Path, plan_config: Configure):
        document = plan(
            self.write(tmp_path, model={"config": str(plan_config()), "weights": "random"}, plan=self.POPULATION)
        )
        assert {each["workload"] for each in document["cells"]} == {"chat"}
        assert document["cells"][0]["cached_tokens"] == 30
        assert document["device"] is None

    def test_a_models_path_is_the_files(self, tmp_path: Path, plan_config: Configure, monkeypatch: pytest.MonkeyPatch):
        """A hub id is no folder of the working directory."""
        plan_config()
        (tmp_path / "elsewhere" / "gpt2").mkdir(parents=True)
        (tmp_path / "config.json").rename(tmp_path / "elsewhere" / "gpt2" / "config.json")
        monkeypatch.chdir(tmp_path / "elsewhere")
        path = self.write(tmp_path, model={"source": "gpt2"}, plan=self.POPULATION)
        assert plan(path)["model_type"] == "gpt2"

    def test_the_model_may_be_an_option(self, tmp_path: Path):
        assert plan(self.write(tmp_path, plan=self.POPULATION), "--model", "gpt2")["model_type"] == "gpt2"

    def test_another_model_brings_its_own_weights(self, plan_experiment: Configure):
        """GPT-2 has 124,439,808 parameters; the file's weights are another model's."""
        document = plan(str(plan_experiment()), "--model", "gpt2", "--vram-gib", "1")
        assert document["device"]["weights_bytes"] == 2 * 124_439_808

    def test_text_prompts_need_no_tokenizer_here(self, plan_experiment: Configure):
        path = plan_experiment(workloads=[{"prompt_tokens": 97, "output_tokens": 4}])
        assert plan(str(path))["cached_tokens"] == 100

    @pytest.mark.parametrize(
        ("content", "words"),
        [
            ({"plan": {}}, "model: required"),
            ({"model": {"source": "gpt2"}}, "no lengths: state workloads or plan.population"),
            ({"model": {"source": "gpt2"}, "plan": {"populatoin": []}}, "did you mean 'population'"),
            ({"model": {"source": "gpt2"}, "strategies": [{"kind": "paged"}]}, "'paged'"),
        ],
    )
    def test_what_is_needed_is_named(self, tmp_path: Path, content: dict[str, Any], words: str):
        result = invoke(self.write(tmp_path, **content))
        assert result.exit_code == 2
        assert words in " ".join(result.output.split())


BAD_ARGUMENTS = {
    "nothing": ([], ["give an experiment file, or --model"]),
    "no lengths": (["--model", "gpt2"], ["--model needs --prompt-tokens"]),
    "unknown model": (["--model", "llama-9", "--prompt-tokens", "4"], ["llama-9", "near presets", "Nothing is downloaded"]),
    "missing file": (["nowhere.yaml"], ["nowhere.yaml: cannot be read"]),
    "no tokens": (["--model", "gpt2", "--prompt-tokens", "0"], ["--prompt-tokens '0'", "from 1 to 16,777,216"]),
    "text for tokens": (["--model", "gpt2", "--prompt-tokens", "4k"], ["--prompt-tokens '4k'", "START:STOP:STEP"]),
    "nothing for tokens": (["--model", "gpt2", "--prompt-tokens", ""], ["--prompt-tokens ''", "START:STOP:STEP"]),
    "a number of thousand digits": (["--model", "gpt2", "--prompt-tokens", "9" * 5000], ["--prompt-tokens", "START:STOP:STEP"]),
    "digits of another script": (["--model", "gpt2", "--prompt-tokens", "\u0661:\u0663:\u0661"], ["--prompt-tokens", "START:STOP:STEP"]),
    "a grid without end": (["--model", "gpt2", "--prompt-tokens", "1:16777216:1", "--output-tokens", "0:16777216:1", "--csv", "x"], ["combinations", "at most 5,000,000"]),
    "nothing for a model": (["--model", "", "--prompt-tokens", "4"], ["--model: ''"]),
    "more ranks than there are": (["--model", "gpt2", "--prompt-tokens", "4", "--tp", "9" * 20], ["--tp 9999", "from 1 to 65536"]),
    "stages for shared layers": (["--model", "gemma-3n-e4b", "--prompt-tokens", "4", "--pp", "2"], ["--pp, or plan.partition.pipeline_parallel", "read earlier layers' KV"]),
    "more bytes than there are": (["--model", "opt-66b", "--prompt-tokens", "16777216", "--output-tokens", "16777216", "--batch-size", "65536", "--dtype", "float32"], ["bytes of KV cache", "less than"]),
    "encoder tokens of a decoder": (["--model", "gpt2", "--prompt-tokens", "4", "--encoder-tokens", "9"], ["no cross-attention"]),
    "a reserve of nothing": (["--model", "gpt2", "--prompt-tokens", "4", "--host-reserve-gib", "9"], ["--host-reserve-gib 9", "memory_bytes or limit_bytes"]),
    "a kind twice": (["--model", "gpt2", "--prompt-tokens", "4", "--strategy", "dynamic:kind=streamed"], ["kind is given twice"]),
    "an option twice": (["--model", "gpt2", "--prompt-tokens", "4", "--strategy", "quantized:nbits=4,nbits=2"], ["nbits is given twice"]),
    "nothing for csv": (["--model", "gpt2", "--prompt-tokens", "4", "--csv", ""], ["--csv: ''"]),
    "range backwards": (["--model", "gpt2", "--prompt-tokens", "9:1:1"], ["9:1:1"]),
    "range without a step": (["--model", "gpt2", "--prompt-tokens", "1:9:0"], ["1:9:0"]),
    "huge batch": (["--model", "gpt2", "--prompt-tokens", "4", "--batch-size", "70000"], ["from 1 to 65,536"]),
    "budget without a card": (["--model", "gpt2", "--prompt-tokens", "4", "--weights-gib", "1"], ["needs --vram-gib"]),
    "weights not known": (["--model", BASE_MODEL, "--prompt-tokens", "4", "--vram-gib", "1"], ["--weights-gib"]),
    "negative card": (["--model", "gpt2", "--prompt-tokens", "4", "--vram-gib", "-3"], ["--vram-gib -3"]),
    "no number": (["--model", "gpt2", "--prompt-tokens", "4", "--vram-gib", "nan"], ["--vram-gib nan"]),
    "infinite card": (["--model", "gpt2", "--prompt-tokens", "4", "--vram-gib", "inf"], ["--vram-gib inf"]),
    "no ranks": (["--model", "gpt2", "--prompt-tokens", "4", "--tp", "0"], ["--tp 0", "from 1 to 65536"]),
    "near-miss strategy": (["--model", "gpt2", "--prompt-tokens", "4", "--strategy", "quantised"], ["paged, dynamic", "did you mean 'quantized'"]),
    "bits of another backend": (["--model", "gpt2", "--prompt-tokens", "4", "--strategy", "quantized:nbits=3"], ["nbits: 3", "quanto takes 2, 4"]),
    "format of a paged engine": (["--model", "gpt2", "--prompt-tokens", "4", "--strategy", "paged:kv_cache_dtype=fp4"], ["kv_cache_dtype: 'fp4'", "int4"]),
    "unknown option of a paged engine": (["--model", "gpt2", "--prompt-tokens", "4", "--strategy", "paged:pages=4"], ["pages: unknown key", "block_tokens"]),
    "option without a value": (["--model", "gpt2", "--prompt-tokens", "4", "--strategy", "streamed:x"], ["'x' is not key=value"]),
    "strategy twice": (["--model", "gpt2", "--prompt-tokens", "4", "--strategy", "paged,dynamic,paged"], ["paged is named twice"]),
    "near-miss dtype": (["--model", "gpt2", "--prompt-tokens", "4", "--kv-cache-dtype", "fp4"], ["'fp4'", "int4"]),
    "policy": (["--model", "gpt2", "--prompt-tokens", "4", "--long-requests", "truncate"], ["'truncate'", "queue, refuse, suggest"]),
    "two forms": (["--model", "gpt2", "--prompt-tokens", "4", "--json", "--csv", "x"], ["--csv and --json"]),
    "no folder for csv": (["--model", "gpt2", "--prompt-tokens", "4", "--csv", "no/where/x.csv"], ["no/where/x.csv"]),
    "override without a file": (["--model", "gpt2", "--prompt-tokens", "4", "--set", "a=1"], ["needs an experiment file"]),
    "too many to show": (["--model", "gpt2", "--prompt-tokens", "1:16000:1"], ["cells are too many", "--csv FILE"]),
    "no estimate": (["--model", "mixtral-8x7b", "--prompt-tokens", "4", "--vram-gib", "99", "--estimate-activations"], ["dense gated MLPs", "--activations-gib"]),
    "runtime takes all": (["--model", "gpt2", "--prompt-tokens", "4", "--vram-gib", "1", "--runtime-gib", "1"], ["--vram-gib 1", "runtime_bytes + reserve_bytes"]),
}  # fmt: skip


@pytest.mark.parametrize(("arguments", "words"), BAD_ARGUMENTS.values(), ids=BAD_ARGUMENTS)
def test_bad_arguments_end_with_2_and_one_line(arguments: list[str], words: list[str]):
    result = invoke(*arguments)
    assert result.exit_code == 2, result.output
    assert all(word in " ".join(result.output.split()) for word in words), result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("section", "override", "words"),
    [
        ("model", "model.dtype=float32", "model: required, and missing"),
        ("workloads", "workloads.0.batch_size=4", "workloads is nothing, which has no 0 inside"),
        ("strategies", "strategies.0.name=x", "strategies is nothing, which has no 0 inside"),
    ],
)
def test_nothing_is_filled_in_beside_a_value_that_is_set_in_a_section_the_file_lacks(
    tmp_path: Path, section: str, override: str, words: str
):
    sections = {
        "model": "{source: gpt2}",
        "workloads": "[{prompt_tokens: 4, output_tokens: 2}]",
        "strategies": "[{kind: static}]",
    }
    path = tmp_path / "x.yaml"
    path.write_text("".join(f"{name}: {text}\n" for name, text in sections.items() if name != section))
    result = invoke(str(path), "--set", override)
    assert (result.exit_code, result.stdout) == (2, "")
    assert words in " ".join(result.stderr.split())


@pytest.mark.parametrize("case", sorted(MALFORMED))
def test_a_malformed_config_ends_with_its_exit_code_and_one_line(case: str, tmp_path: Path):
    file, exit_code, words = MALFORMED[case]
    path = write(file, tmp_path)
    result = invoke("--model", str(path), "--prompt-tokens", "64", "--json")
    assert (result.exit_code, result.stdout) == (exit_code, ""), result.output
    assert isinstance(result.exception, SystemExit), "no traceback"
    message = " ".join(result.stderr.split())
    assert message.startswith(f"error: {path}: ")
    assert all(word in message for word in words), message


def test_the_mix_that_readme_shows_is_planned(tmp_path: Path):
    """Both groups are within the cap; paged holds at least one copy of the mix on 80 GiB."""
    blocks = (ROOT / "README.md").read_text().split("```yaml\n")
    (block,) = [each.partition("```")[0] for each in blocks if "population:" in each]
    path = tmp_path / "mix.yaml"
    path.write_text(block)
    document = plan(str(path))
    assert [each["workload"] for each in document["cells"]][:: len(document["population"])] == ["chat", "search"]
    assert document["long_requests"] == []
    assert document["population"][0]["sums"][0]["mixes"] >= 1


def test_the_commands_that_readme_shows_for_plan_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)
    lines = [line.partition("#")[0].split() for line in (ROOT / "README.md").read_text().splitlines()]
    commands = [line[2:] for line in lines if line[:2] == ["offload-eval", "plan"]]
    assert len(commands) >= 4
    for command in commands:
        arguments = [str(tmp_path / "grid.csv") if each == "grid.csv" else each for each in command]
        arguments = [BASE_MODEL if each == "config.json" else each for each in arguments]
        assert invoke(*arguments).exit_code == 0, command
