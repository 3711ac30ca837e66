# ruff: noqa: E501 - one row a case
"""Ways to get an experiment file wrong, one edit of a good file each."""

GOOD = """\
name: demo
model: {source: org/model, revision: main}
budget: {device_bytes: 1000}
workloads:
  - {batch_size: 2, prompt_tokens: 64, output_tokens: 8}
  - {name: long, prompt_tokens: 512, output_tokens: 8}
strategies:
  - kind: dynamic
  - {kind: quantized, backend: hqq, nbits: 4}
"""

# Each row: what of GOOD is replaced, by what, and what the message must say.
MALFORMED = {
    "unknown key": ("batch_size: 2", "batchsize: 2", ["workloads[0].batchsize", "unknown key", "seed", "'batch_size'"]),
    "unknown top-level key": ("name: demo", "name: demo\nstrategy: 1", ["strategy: unknown key", "did you mean 'strategies'"]),
    "unknown key of a strategy": ("nbits: 4", "bits: 4", ["strategies[1].bits", "kind", "q_group_size", "did you mean 'nbits'"]),
    "option of another kind": ("kind: dynamic", "{kind: dynamic, nbits: 4}", ["strategies[0].nbits", "allowed: kind, name"]),
    "near-miss kind": ("kind: quantized", "kind: quantised", ["strategies[1].kind: 'quantised'", "offloaded", "did you mean 'quantized'"]),
    "near-miss backend": ("backend: hqq", "backend: quantum", ["strategies[1].backend: 'quantum'", "fp8, hqq, quanto", "did you mean 'quanto'"]),
    "far-off enum": ("name: demo", "name: demo\ndevice: tpu", ["device: 'tpu'", "auto, cpu, cuda"]),
    "near-miss dtype": ("revision: main", "dtype: bfloat", ["model.dtype: 'bfloat'", "float32", "did you mean 'bfloat16'"]),
    "missing kind": ("kind: dynamic", "knd: dynamic", ["strategies[0].kind: required", "streamed", "is it the key 'knd'"]),
    "kind that is not text": ("kind: dynamic", "kind: 3", ["strategies[0].kind: 3 (integer)", "allowed: dynamic, "]),
    "strategy as text": ("- kind: dynamic", "- dynamic", ["strategies[0]: 'dynamic' (text)", "`kind`, one of dynamic, "]),
    "missing required key": ("budget: {device_bytes: 1000}", "budget: {}", ["budget.device_bytes: required", "GiB"]),
    "missing section": ("budget: {device_bytes: 1000}\n", "", ["budget: required", "device_bytes, weights_bytes"]),
    "missing option": ("backend: hqq, ", "", ["strategies[1].backend: required", "fp8, hqq, quanto"]),
    "text for an integer": ("batch_size: 2", "batch_size: two", ["workloads[0].batch_size: 'two' (text)", "integer >= 1"]),
    "quoted integer": ("batch_size: 2", "batch_size: '2'", ["workloads[0].batch_size: '2' (text)"]),
    "decimal for an integer": ("batch_size: 2", "batch_size: 2.0", ["workloads[0].batch_size: 2.0 (decimal"]),
    "bool for an integer": ("batch_size: 2", "batch_size: yes", ["workloads[0].batch_size: true (boolean)", "integer >= 1"]),
    "integer for a bool": ("name: demo", "name: demo\nmeasurement: {fidelity: 1}", ["measurement.fidelity: 1", "allowed: true or false"]),
    "nothing for a list": ("strategies:\n", "strategies:\nquestion: [\n", ["demo.yaml: not valid YAML: line 9"]),
    "zero batch": ("batch_size: 2", "batch_size: 0", ["workloads[0].batch_size: 0", "integer >= 1"]),
    "negative prompt": ("prompt_tokens: 64", "prompt_tokens: -64", ["workloads[0].prompt_tokens: -64", "integer >= 1"]),
    "one output token": ("output_tokens: 8}\n  - {name", "output_tokens: 1}\n  - {name", ["workloads[0].output_tokens: 1 ", "integer >= 2"]),
    "negative seed": ("batch_size: 2", "seed: -1", ["workloads[0].seed: -1", "integer >= 0"]),
    "integer past 64 bits": ("batch_size: 2", "seed: 9223372036854775808", ["workloads[0].seed", "too large", "9223372036854775807"]),
    "name with a blank": ("name: demo", "name: my demo", ["name: 'my demo'", "letters, digits"]),
    "name of 81 characters": ("name: demo", "name: " + "a" * 81, ["name: 'aaa", "at most 80"]),
    "empty list": ("  - kind: dynamic\n  - {kind: quantized, backend: hqq, nbits: 4}\n", "  []\n", ["strategies: []", "at least 1"]),
    "mapping for a list": ("strategies:\n", "strategies: {kind: dynamic}\nx:\n", ["strategies: {'kind': 'dynamic'} (mapping)", "list"]),
    "list for a mapping": ("{device_bytes: 1000}", "[1000]", ["budget: [1000] (list)", "mapping with device_bytes"]),
    "size that is none": ("device_bytes: 1000", "device_bytes: 24 gigs", ["budget.device_bytes: '24 gigs'", "GiB"]),
    "fraction of a byte": ("device_bytes: 1000", "device_bytes: 0.3 B", ["budget.device_bytes: '0.3 B'", "whole number"]),
    "zero size": ("device_bytes: 1000", "device_bytes: 0 GiB", ["budget.device_bytes: 0", "integer >= 1", "GiB"]),
    "size past 64 bits": ("device_bytes: 1000", "device_bytes: 9000000 TiB", ["budget.device_bytes", "too large"]),
    "bandwidth that is none": ("name: demo", "name: demo\ncpu: {link_bytes_per_s: fast}", ["cpu.link_bytes_per_s: 'fast'", "GiB"]),
    "budget all taken": ("device_bytes: 1000", "device_bytes: 1000, runtime_bytes: 600, reserve_bytes: 400", ["budget.device_bytes: 1000", "more than", "= 1000"]),
    "infinity": ("name: demo", "name: demo\nmeasurement: {cell_timeout_s: .inf}", ["measurement.cell_timeout_s: .inf", "finite"]),
    "not a number": ("name: demo", "name: demo\nmeasurement: {cell_timeout_s: .nan}", ["measurement.cell_timeout_s: .nan", "finite"]),
    "overflowing float": ("name: demo", "name: demo\nmeasurement: {cell_timeout_s: 1.0e+999}", ["measurement.cell_timeout_s", "finite"]),
    "zero timeout": ("name: demo", "name: demo\nmeasurement: {cell_timeout_s: 0}", ["measurement.cell_timeout_s: 0", "number > 0"]),
    "duplicate key": ("name: demo", "name: demo\nname: other", ["name: the key is given twice (lines 1 and 2)"]),
    "duplicate nested key": ("batch_size: 2", "batch_size: 2, batch_size: 4", ["workloads[0].batch_size: the key is given twice"]),
    "key that is not text": ("name: demo", "name: demo\n5: x", ["the key '5' (line 2) is not text"]),
    "key that is a bool": ("name: demo", "name: demo\non: x", ["the key 'on' (line 2) is not text"]),
    "python tag": ("name: demo", "name: !!python/name:os.system", ["name: the tag", "line 1", "not allowed"]),
    "alias that contains itself": ("name: demo", "name: demo\nquestion: &q [*q]", ["not valid YAML", "alias"]),
    "unclosed bracket": ("{device_bytes: 1000}", "{device_bytes: 1000", ["not valid YAML: line 4"]),
    "tab as indentation": ("  - kind: dynamic", "\t- kind: dynamic", ["not valid YAML: line 8, column 1"]),
    "two documents": ("name: demo", "name: demo\n---\nname: two", ["not valid YAML: line 2"]),
    "duplicate workload label": ("{name: long, prompt_tokens: 512", "{batch_size: 2, prompt_tokens: 64", ["workloads: the label 'b2-p64-o8' is used 2 times (workloads[0], workloads[1])", "name"]),
    "duplicate strategy label": ("{kind: quantized, backend: hqq, nbits: 4}", "{kind: dynamic}", ["strategies: the label 'dynamic' is used 2 times"]),
    "same label spelled two ways": ("kind: dynamic", "{kind: quantized, backend: hqq}", ["the label 'quantized-hqq-int4' is used 2 times"]),
    "baseline that names nothing": ("name: demo", "name: demo\nbaseline: dynamik", ["baseline: 'dynamik'", "quantized-hqq-int4", "did you mean 'dynamic'"]),
    "no model": ("source: org/model, revision: main", "dtype: float32", ["model: exactly one of source and config", "neither"]),
    "two models": ("revision: main", "config: x.json", ["model: exactly one of source and config", "both"]),
    "empty source": ("source: org/model, revision: main", "source: ''", ["model.source: ''"]),
    "random weights of a source": ("revision: main", "weights: random", ["model.weights: 'random' needs model.config"]),
    "revision of a config": ("source: org/model", "config: config.json, weights: random", ["model.revision: 'main' needs a hub id"]),
    "pretrained weights of a config": ("source: org/model, revision: main", "config: config.json", ["model.weights: 'pretrained' needs model.source", "allowed: random"]),
    "text prompt without a tokenizer": ("source: org/model, revision: main", "config: config.json, weights: random", ["workloads[0].prompt: kind 'pydoc' needs a tokenizer", "kind: random"]),
    "prompt without a path": ("batch_size: 2", "prompt: {kind: text}", ["workloads[0].prompt.path: required", "text"]),
    "prompt with an empty path": ("batch_size: 2", "prompt: {kind: text, path: ''}", ["workloads[0].prompt.path: ''"]),
    "near-miss prompt kind": ("batch_size: 2", "prompt: {kind: json}", ["workloads[0].prompt.kind: 'json'", "pydoc, text, jsonl, random", "'jsonl'"]),
    "prompt file that is missing": ("batch_size: 2", "prompt: {kind: jsonl, path: no.jsonl}", ["workloads[0].prompt.path: 'no.jsonl' does not exist"]),
    "prompt that is a folder": ("batch_size: 2", "prompt: {kind: text, path: .}", ["workloads[0].prompt.path: '.' is not a file"]),
    "local source that is missing": ("source: org/model, revision: main", "source: ./org/model", ["model.source: './org/model' does not exist"]),
    "GGUF file that is missing": ("source: org/model, revision: main", "source: org/model.gguf", ["model.source: 'org/model.gguf' does not exist"]),
    "hqq with 3 bits": ("nbits: 4", "nbits: 3", ["strategies[1].nbits: 3", "1, 2, 4, 8"]),
    "hqq along the last axis": ("nbits: 4", "axis_key: -1", ["strategies[1].axis_key: -1", "backend hqq takes 0, 1"]),
    "quanto with 8 bits": ("backend: hqq, nbits: 4", "backend: quanto, nbits: 8", ["strategies[1].nbits: 8", "backend quanto takes 2, 4"]),
    "quanto along axis 1": ("backend: hqq, nbits: 4", "backend: quanto, axis_value: 1", ["strategies[1].axis_value: 1", "0, -1"]),
    "fp8 with a group size": ("backend: hqq, nbits: 4", "backend: fp8, q_group_size: 64", ["strategies[1].q_group_size: 64", "backend fp8 takes no q_group_size"]),
    "fp8 with bits": ("backend: hqq, nbits: 4", "backend: fp8, nbits: 8", ["strategies[1].nbits: 8", "backend fp8 takes no nbits"]),
}  # fmt: skip
