"""`python -m offload_eval` is the `offload-eval` command."""

from offload_eval.cli.app import main

if __name__ == "__main__":
    main()
