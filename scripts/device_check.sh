#!/usr/bin/env bash
# One command that measures on this machine's GPU what the toolkit claims, and leaves everything in one archive.
set -euo pipefail

usage() {
  cat <<'USAGE'
usage: scripts/device_check.sh [options]
       scripts/device_check.sh --prepare DIR [--python-version 3.12]

Doctor, contract tests, link calibration, an experiment held against that link, its first strategies again under a
smaller budget that is enforced, and the most sessions that fit that budget, with failures brought about. A step that fails costs no other one. Needs no network and no installation: it runs
from the checkout, with the packages of the interpreter, or with wheels brought along.

  --device auto|cuda|cpu   default: auto, cuda where torch sees one
  --out DIR                new or empty; default: runs/device_check-<UTC time>
  --archive FILE           default: DIR/device_check.tar.gz
  --experiment FILE        default: configs/llama-3.1-8b_offload.yaml on cuda, configs/tiny_offload.yaml on cpu
  --small-budget SIZE      default: '24 GiB' on cuda, '2 MiB' on cpu
  --limit-s SECONDS        of all steps together; default: 480
  --wheels DIR             unpack these wheels into a temporary folder, and use them before what is installed
  --prepare DIR            only download those wheels, for linux x86-64: the tested versions of everything but torch,
                           numpy, pandas and compilers of quantizers; needs a network
  --python-version X.Y     for --prepare: of the machine that will use them; default: this interpreter's

PYTHON names the interpreter; default: .venv/bin/python where there is one, else python3.
Exit codes: 0 every step done, 1 a step failed or found no time, 2 a wrong option, 3 no interpreter, torch or device.
USAGE
}

# No development tools, nothing that is large or belongs to one torch.
readonly NOT_CARRIED='torch|numpy|pandas|sympy|mpmath|networkx|jinja2|markupsafe|psutil|hf-xet|hqq|einops|termcolor'
NOT_CARRIED_TOOLS='ninja|optimum-quanto|mypy|mypy-extensions|librt|ast-serialize|pathspec|pandas-stubs'
NOT_CARRIED_TOOLS+='|types-pyyaml|ruff|grimp|import-linter'
readonly LEAST_STEP_S=5

die() { # code, message
  printf 'device_check: %s\n' "$2" >&2
  exit "$1"
}

device=auto out= archive= experiment= small_budget= limit_s=480 wheels= prepare= python_version=
while (($#)); do
  case "$1" in
    -h | --help) usage; exit 0 ;;
    --device | --out | --archive | --experiment | --small-budget | --limit-s | --wheels | --prepare | --python-version)
      (($# > 1)) || die 2 "$1 needs a value; see --help"
      name=${1#--}
      printf -v "${name//-/_}" '%s' "$2"
      shift 2
      ;;
    *) die 2 "$1: no such option; see --help" ;;
  esac
done
[[ $device =~ ^(auto|cuda|cpu)$ ]] || die 2 "--device $device: allowed: auto, cuda, cpu"
[[ $limit_s =~ ^[1-9][0-9]{0,5}$ ]] || die 2 "--limit-s $limit_s: allowed: whole seconds, 1 to 999999"

# Options name paths from where the caller stands; everything else is named from the repository's root.
caller=$PWD
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
root=$PWD
absolute() { # path
  case "$1" in
    /*) printf '%s' "$1" ;;
    *) printf '%s/%s' "$caller" "$1" ;;
  esac
}

python=${PYTHON:-}
[[ $python != */* ]] || python=$(absolute "$python")
[[ -n $python || ! -x .venv/bin/python ]] || python=$root/.venv/bin/python
python=${python:-python3}
command -v -- "$python" >/dev/null || die 3 "$python: no such interpreter; set PYTHON"

if [[ -n $prepare ]]; then
  prepare=$(absolute "$prepare")
  [[ -z $(ls -A -- "$prepare" 2>/dev/null) ]] ||
    die 2 "--prepare $prepare: is not empty; two versions of a wheel would not install"
  version=${python_version:-$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')}
  mapfile -t pins < <(grep -E '^[a-z]' constraints.txt | grep -vE "^($NOT_CARRIED|$NOT_CARRIED_TOOLS)==")
  platforms=()
  for tag in manylinux_2_28 manylinux_2_27 manylinux_2_24 manylinux_2_17 manylinux2014 manylinux2010 manylinux1; do
    platforms+=(--platform "${tag}_x86_64")
  done
  "$python" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --implementation cp \
    --python-version "$version" "${platforms[@]}" -d "$prepare" "${pins[@]}"
  size_mib=$(du -sm -- "$prepare" | cut -f1)
  printf '%s wheels for Python %s, %s MiB: %s\n' "${#pins[@]}" "$version" "$size_mib" "$prepare"
  exit 0
fi

out=$(absolute "${out:-$root/runs/device_check-$(date -u +%Y%m%dT%H%M%SZ)}")
[[ ! -e $out || -d $out ]] || die 2 "--out $out: is a file; give a folder"
[[ ! -d $out || -z $(ls -A -- "$out") ]] ||
  die 2 "--out $out: is not empty, and nothing is overwritten; give another folder"
if [[ -n $archive ]]; then
  archive=$(absolute "$archive")
  [[ -d $(dirname -- "$archive") ]] || die 2 "--archive $archive: its folder does not exist"
  [[ ! -e $archive ]] || die 2 "--archive $archive: exists, and nothing is overwritten; give another name"
fi
archive=${archive:-$out/device_check.tar.gz}

temporary=$(mktemp -d)
trap 'rm -rf -- "$temporary"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HF_HUB_OFFLINE=1
export PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 # what else is installed here need not know the pytest brought along
if [[ -n $wheels ]]; then
  wheels=$(absolute "$wheels")
  compgen -G "$wheels/*.whl" >/dev/null || die 2 "--wheels $wheels: holds no wheels; fill it with --prepare"
  "$python" -m pip install --quiet --disable-pip-version-check --no-index --no-deps --no-compile --no-cache-dir \
    --target "$temporary/site" "$wheels"/*.whl || die 3 "--wheels $wheels: could not be unpacked for $("$python" -V)"
  export PYTHONPATH=$root:$temporary/site:$PYTHONPATH
  unset PYTHONDONTWRITEBYTECODE # the unpacked packages are compiled once, and not by every process
fi

found=$("$python" -c 'import torch; print("cuda" if torch.cuda.is_available() else "cpu")') ||
  die 3 "$python has no torch"
[[ $device != auto ]] || device=$found
[[ $device != cuda || $found == cuda ]] || die 3 "--device cuda: torch sees no CUDA device; allowed here: cpu"
case "$device" in
  cuda)
    experiment=${experiment:-$root/configs/llama-3.1-8b_offload.yaml}
    small_budget=${small_budget:-24 GiB} most_mib=128 capacity_tokens=4096
    tests=(-m cuda tests/test_device_contract.py tests/test_cuda_strategies.py)
    ;;
  cpu)
    experiment=${experiment:-$root/configs/tiny_offload.yaml}
    small_budget=${small_budget:-2 MiB} most_mib=4 capacity_tokens=64
    tests=(-m 'not cuda' tests/test_device_contract.py)
    ;;
esac
experiment=$(absolute "$experiment")
[[ -f $experiment ]] || die 2 "--experiment $experiment: no such file"
mkdir -p -- "$out" 2>/dev/null || die 2 "--out $out: cannot be made"

failed=0
summarize() { # words of one line
  printf '%s\n' "$1" | tee -a -- "$out/summary.txt"
}

# After every step, so that what was measured is safe should anything later end this script. Logits of a run that did
# not finish are large, and stay behind.
pack() {
  tar -C "$out" --exclude='*.logits.npy' --exclude='.lock' --exclude='*.tar.gz*' -czf "$temporary/archive" . &&
    mv -- "$temporary/archive" "$archive"
}

step() { # name, most seconds, file for stdout, command...
  local name=$1 most_s=$2 stdout=$3 log="$out/$1.log" started=$SECONDS code=0
  shift 3
  local left_s=$((limit_s - SECONDS))
  if ((left_s < LEAST_STEP_S)); then
    failed=1
    summarize "$name: skipped: $left_s s of --limit-s $limit_s are left"
    pack || true
    return
  fi
  printf '\n== %s\n' "$name"
  # An interrupt lets a run keep its finished cells; what ignores it is killed.
  timeout --foreground --signal=INT --kill-after=10 "$((most_s < left_s ? most_s : left_s))" "$@" \
    >>"$stdout" 2>>"$log" </dev/null || code=$?
  tail -n 40 -- "$log"
  case "$code" in
    0) summarize "$name: ok, $((SECONDS - started)) s" ;;
    124 | 137) failed=1 && summarize "$name: failed: not done after $((SECONDS - started)) s; see $name.log" ;;
    *) failed=1 && summarize "$name: failed: exit code $code after $((SECONDS - started)) s; see $name.log" ;;
  esac
  pack || { failed=1 && summarize "$name: its files could not be put into $archive"; }
}

measure() { # name, most seconds, command, options...
  local name=$1 most_s=$2 command=$3
  shift 3
  step "$name" "$most_s" "$out/$name.log" \
    "$python" -m offload_eval "$command" "$experiment" --device "$device" --out "$out/$name" "$@"
  # A run that was cut short has its finished cells on disk.
  if [[ -f $out/$name/records.jsonl && ! -f $out/$name/report.md ]]; then
    step "$name-report" 30 "$out/$name-report.log" "$python" -m offload_eval report "$out/$name"
  fi
}

step doctor 60 "$out/doctor.log" "$python" -m offload_eval doctor
step contract 120 "$out/contract.log" "$python" -m pytest -q -p no:cacheprovider "${tests[@]}"
# Memory bandwidth and peaks are not measured: they come from the card's data sheet, where the card is known.
card=()
[[ $device != cuda ]] || [[ $("$python" -c 'import torch; print(torch.cuda.get_device_name())') != *H200* ]] ||
  card=(--hardware h200-sxm)
step link 60 "$out/link.json" "$python" -m offload_eval link --device "$device" --most-mib "$most_mib" --repeats 5 \
  --json --out "$out/link.yaml" "${card[@]}"
against=()
[[ ! -f $out/link.yaml ]] || against=(--set "hardware=$out/link.yaml")
measure run 290 run "${against[@]}"
measure run-small-budget 90 run "${against[@]}" --set "budget.device_bytes=$small_budget" --set budget.enforce=true \
  --set 'strategies=[{kind: dynamic}, {kind: streamed}]' --set trace=false --set measurement.trials=1 \
  --set measurement.fidelity=false
measure capacity 120 capacity --set "budget.device_bytes=$small_budget" \
  --set 'strategies=[{kind: dynamic}, {kind: streamed}]' --set 'capacity={timing_trials: 1, search_timeout_s: 60}' \
  --set "workloads=[{prompt_tokens: $capacity_tokens, output_tokens: 17, prompt: {kind: random}}]"

printf '\n== summary\n'
cat -- "$out/summary.txt"
printf '%s s; everything: %s; in one file: %s\n' "$SECONDS" "$out" "$archive"
exit "$failed"
