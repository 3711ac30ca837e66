"""What the fork server imports once, so that no worker pays for it. Nothing here touches a device."""

import torch  # noqa: F401

import offload_eval.execution.cell
import offload_eval.execution.preflight  # noqa: F401
