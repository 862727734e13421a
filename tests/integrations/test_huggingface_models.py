"""Real models of transformers, made from a configuration: theirs read by us, and ours by them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from safepoint.manager import CheckpointManager, Rename, convert, restore_foreign

if TYPE_CHECKING:
    from pathlib import Path

transformers = pytest.importorskip("transformers")

SIZES = {"one": 10**9, "several": 1000}


def tied() -> Any:
    config = transformers.GPT2Config(
        vocab_size=11, n_positions=4, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config)


def untied() -> Any:
    config = transformers.LlamaConfig(
        vocab_size=11,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=False,
    )
    return transformers.LlamaForCausalLM(config).to(torch.bfloat16)


MODELS = {"tied": tied, "untied": untied}


def assert_same(one: Any, other: Any) -> None:
    found, wanted = one.state_dict(), other.state_dict()
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("files", SIZES)
@pytest.mark.parametrize("kind", MODELS)
def test_transformers_loads_what_was_converted(tmp_path: Path, kind: str, files: str) -> None:
    model = MODELS[kind]()
    with CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, {"model": model, "optimizer": torch.optim.AdamW(model.parameters())})
    (made,) = convert(tmp_path / "run", tmp_path / "hf", format="huggingface", max_file_bytes=SIZES[files]).steps
    model.config.save_pretrained(tmp_path / "hf")
    loaded, told = type(model).from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not any(told.values())
    assert_same(loaded, model)
    assert (loaded.get_input_embeddings().weight is loaded.get_output_embeddings().weight) == (kind == "tied")
    names = [name for name in made.files if name.endswith(".safetensors")]
    assert (len(names) == 1) == (files == "one")
    held = {key: value for name in names for key, value in load_file(tmp_path / "hf" / name).items()}
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in held.items())
    with safe_open(tmp_path / "hf" / names[0], "pt") as opened:
        assert opened.metadata()["format"] == "pt"
    assert (
        convert(tmp_path / "run", tmp_path / "hf", format="huggingface", max_file_bytes=SIZES[files]).steps[0].outcome
        == "present"
    )


@pytest.mark.parametrize("files", SIZES)
@pytest.mark.parametrize("kind", MODELS)
def test_what_transformers_saved_fills_a_model_and_becomes_a_step(tmp_path: Path, kind: str, files: str) -> None:
    model, other, third = MODELS[kind](), MODELS[kind](), MODELS[kind]()
    model.save_pretrained(tmp_path / "hf", max_shard_size=SIZES[files])
    restore_foreign(tmp_path / "hf", {"model": other}, adapt=[Rename({"*": "model.*"})])
    assert_same(other, model)
    convert(tmp_path / "hf", tmp_path / "run")
    with CheckpointManager(tmp_path / "run") as manager:
        restored = manager.restore(0).state
    assert restored is not None
    third.load_state_dict(restored, strict=kind == "untied")
    third.tie_weights()
    assert_same(third, model)
