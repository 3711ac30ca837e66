"""How every command ends: with its exit code, and one line for a failure that the user can mend."""

from collections.abc import Callable
from typing import NoReturn

import typer

from offload_eval.errors import ExitCode, OffloadEvalError


def end(body: Callable[[], int]) -> NoReturn:
    """Ends a command with its exit code; a failure that the user can mend becomes one line."""
    try:
        code = body()
    except OffloadEvalError as error:
        from offload_eval.cli.console import print_error

        print_error(str(error))
        code = error.exit_code
    except BrokenPipeError:
        from offload_eval.cli.console import PIPE_CLOSED, hush_standard_output

        hush_standard_output()
        code = PIPE_CLOSED
    except OSError as error:
        from offload_eval.cli.console import print_error

        print_error(f"{error.filename or 'standard output'}: {error.strerror or error}")
        code = ExitCode.ENVIRONMENT
    except KeyboardInterrupt:
        code = ExitCode.INTERRUPTED
    raise typer.Exit(int(code))
