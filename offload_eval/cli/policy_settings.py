"""`offload-eval policy settings`: what a policy becomes in vLLM, SGLang and Kubernetes."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from offload_eval.cli.ending import end
from offload_eval.cli.option_types import JsonOption


class TargetChoice(StrEnum):
    """What `--target` takes."""

    VLLM = "vllm"
    SGLANG = "sglang"
    KUBERNETES = "kubernetes"


def settings_command(
    policy: Annotated[Path, typer.Argument(help="A policy file.", show_default=False)],
    strategy: Annotated[
        str | None,
        typer.Option(
            metavar="LABEL",
            help="Of the policy's strategies; else the lossless one that admits most at the longest lengths.",
            show_default=False,
        ),
    ] = None,
    target: Annotated[
        TargetChoice | None, typer.Option(help="Only these settings; else all three.", show_default=False)
    ] = None,
    json_output: JsonOption = False,
) -> NoReturn:
    """Show the settings of vLLM, SGLang and a pod that match a policy, each with its derivation."""

    def body() -> int:
        return show_settings(policy, strategy, None if target is None else target.value, json_output=json_output)

    end(body)


def show_settings(policy: Path, strategy: str | None, target: str | None, *, json_output: bool) -> int:
    """Derives the settings and prints them.

    Args:
        policy: A policy file.
        strategy: Label; None: chosen, and the answer says why.
        target: One of `core.handoff.TARGETS`; None: all.
        json_output: As one document, with the blocks to paste by target.

    Raises:
        InputError: The file is no policy, or has no strategy of this label that admits a session.
    """
    import msgspec

    from offload_eval.analysis.handoff import derive_hand_off
    from offload_eval.cli.console import print_json, result_console
    from offload_eval.core.handoff import TARGETS
    from offload_eval.errors import ExitCode
    from offload_eval.reporting.handoff_blocks import render_blocks
    from offload_eval.reporting.handoff_text import render_hand_off_terminal
    from offload_eval.store.policy_file import load_policy

    wanted = [each for each in TARGETS if target in (None, each)]
    hand_off = derive_hand_off(load_policy(policy), strategy, wanted)
    if json_output:
        document = msgspec.to_builtins(hand_off) | {"blocks": render_blocks(hand_off)}
        print_json(msgspec.json.encode(document).decode())
        return ExitCode.DONE
    console = result_console()
    for part in render_hand_off_terminal(hand_off):
        if isinstance(part, str):
            console.out(part, highlight=False)  # a line that is wrapped is another command
        else:
            console.print(part, highlight=False)
    return ExitCode.DONE
