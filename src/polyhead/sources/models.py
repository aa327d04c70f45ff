"""Check and read models and their tokenizers: packaged, from a folder, a GGUF file or the Hugging Face hub.

Weights are read from safetensors or GGUF files, which cannot contain code. Pickled weights and custom model code are
rejected unless the caller allows them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from polyhead.errors import CheckpointError, DeviceError, OptionError
from polyhead.files import as_type, read_json, refusing, short
from polyhead.sources.config_sizes import build_on_meta, check_config, check_room, check_sizes
from polyhead.sources.load_errors import describe_failure, quiet
from polyhead.sources.model_source import ModelSource, find_source

# A "decoder" is a causal model without a language modelling head, an "encoder" a masked one without.
Kind = Literal["causal", "masked", "decoder", "encoder", "encoder-decoder"]

IN_MEMORY = "in memory"  # origin of a model that was passed, not loaded
_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_LAYER_COUNTS = ("num_hidden_layers", "num_layers", "num_decoder_layers", "encoder_layers", "decoder_layers")
_AUTO_CLASSES = ("AutoModelForCausalLM", "AutoModelForMaskedLM", "AutoModelForSeq2SeqLM", "AutoModel")


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """A model in evaluation mode with its tokenizer; `requires_grad` of its parameters is as set by transformers."""

    model: Any
    tokenizer: Any  # None for a model without text input
    name: str
    kind: Kind
    origin: str  # human-readable source
    main_input: str  # name of the main input: input_ids, pixel_values, input_features
    trained_context: int | None  # maximum context length according to the model's config or tokenizer, if known

    def __str__(self) -> str:
        return f"{self.name}: {type(self.model).__name__}, {self.origin}"


def read_config(name: str | os.PathLike[str] | None = None, *, trust_remote_code: bool = False) -> Any | None:
    """Return the config of a model without loading its weights; None for a GGUF file or a folder without a config."""
    source = find_source(name)
    if source.gguf_file is not None:
        return None
    import transformers

    if source.is_local and not (Path(source.location) / "config.json").is_file():
        return None  # `load_model` raises for it
    with quiet(progress=False), describe_failure(source.name, source.location, local=source.is_local):
        return transformers.AutoConfig.from_pretrained(source.location, trust_remote_code=trust_remote_code)


def check_layers(
    name: str | os.PathLike[str] | None, layers: Iterable[int], *, trust_remote_code: bool = False
) -> None:
    """Raise for layer indices that a model does not have according to its config, before loading its weights."""
    config = read_config(name, trust_remote_code=trust_remote_code)
    parts = [config, *(getattr(config, part, None) for part in getattr(config, "sub_configs", {}))]
    counts = [getattr(part, count, None) for part in parts if part is not None for count in _LAYER_COUNTS]
    layer_counts = [count for count in counts if isinstance(count, int)]
    if layer_counts and (beyond := sorted({layer for layer in layers if layer >= max(layer_counts)})):
        got = f"layer{'s' * (len(beyond) > 1)} {', '.join(map(str, beyond))}"
        raise OptionError(f"{name or 'minilm'} has layers 0 to {max(layer_counts) - 1}, got {got}")


def read_shapes(name: str | os.PathLike[str] | None) -> Any | None:
    """Return a model on the meta device, built from its config alone; None for a GGUF file or a folder without one."""
    source = find_source(name)
    if source.gguf_file is None and source.is_local and (Path(source.location) / "config.json").is_file():
        check_config(Path(source.location))
    config = read_config(name)
    if config is None:
        return None
    with quiet(progress=False), describe_failure(source.name, source.location, local=source.is_local):
        check_sizes(config.to_dict(), source.name)
        check_kernels(config, source.name, False)
        return build_on_meta(_model_class(config, source.name, False, from_gguf=False), config).eval()


def read_weights(folder: Path, model_class: Any) -> Any:
    """Load a model saved by transformers from a folder, without a tokenizer, in the dtype that it was saved in."""
    source = ModelSource(folder.resolve().name, str(folder), f"the folder {folder}")
    return read_native(source, None, {"trust_remote_code": False}, model_class=model_class)


def find_class(name: str) -> Any:
    """Return a transformers model class by name."""
    import transformers

    model_class = getattr(transformers, name, None)
    if not (isinstance(model_class, type) and issubclass(model_class, transformers.PreTrainedModel)):
        raise OptionError(f"there is no model class {name!r} in transformers {transformers.__version__}")
    return model_class


def read_native(
    source: ModelSource,
    dtype: torch.dtype | None,
    options: dict[str, Any],
    *,
    model_class: Any = None,
    allow_pickle: bool = False,
) -> Any:
    """Load a model that transformers saved; weights keep their saved dtype if `dtype` is None."""
    import transformers

    trusted = bool(options.get("trust_remote_code"))
    folder = Path(source.location) if source.gguf_file is None and source.is_local else None
    if folder is not None:
        check_folder(folder, allow_pickle)
    config = transformers.AutoConfig.from_pretrained(source.location, **options)
    _check_weights_file(config, source.name, allow_pickle)
    check_kernels(config, source.name, trusted)
    if model_class is None:
        model_class = _model_class(config, source.name, trusted, from_gguf=source.gguf_file is not None)
    if source.gguf_file is not None:
        check_sizes(config.to_dict(), source.gguf_file)
        check_room(model_class, config, (Path(source.location) / source.gguf_file).stat().st_size, source.gguf_file)
    elif folder is not None and hasattr(model_class, "_from_config"):
        check_room(model_class, config, _weight_bytes(folder), str(folder))
    model, report = model_class.from_pretrained(
        source.location,
        config=config,
        dtype="auto" if dtype is None else dtype,
        use_safetensors=None if allow_pickle or source.gguf_file is not None else True,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # reported, and rejected below with their sizes
        **options,
    )
    _check_complete(report, source.name, type(model).__name__)
    return model


def checked_device(device: torch.device | str) -> torch.device:
    """Return a device; raise if it is not available."""
    try:
        result = torch.device(device)
    except RuntimeError as error:
        raise DeviceError(f"a device must be of the form cpu, cuda or cuda:1, got {device!r}") from error
    if result.type == "cuda" and not torch.cuda.is_available():
        raise DeviceError(f"the device {result} needs a GPU that PyTorch can use, got none; use cpu")
    if result.type == "cuda" and (result.index or 0) >= torch.cuda.device_count():
        raise DeviceError(f"the available GPUs are cuda:0 to cuda:{torch.cuda.device_count() - 1}, got {result}")
    return result


def check_folder(folder: Path, allow_pickle: bool) -> None:
    """Check the files of a model's folder: a config with plausible sizes, and weights that cannot run code."""
    files = sorted(path.name for path in folder.iterdir() if path.is_file())
    if "config.json" not in files:
        inside = next((name for name in files if name.endswith(".gguf")), None)
        hint = f"; name the file itself: {folder / inside}" if inside else ""
        raise OptionError(f"a model's folder must contain a config.json, got {folder} without one{hint}")
    check_config(folder)
    pickled = [name for name in files if name.endswith(_PICKLED) and name != "training_args.bin"]
    shards = {name: _shards(folder / name) for name in files if name.endswith(".index.json")}
    if "model.safetensors" in files:
        return
    if "model.safetensors.index.json" in files:
        pickled = [name for name in shards["model.safetensors.index.json"] if name.endswith(_PICKLED)]
    elif not pickled and not any(name.endswith(".safetensors") for name in files):
        raise CheckpointError(f"a model's folder must contain its weights as .safetensors, got {folder} without any")
    if pickled and not allow_pickle:
        raise CheckpointError(_pickle_refusal(str(folder), pickled[0]))


def _shards(index: Path) -> list[str]:
    """Return the shard files of an index, which must be in its folder; they need not be safetensors."""
    rule = f"{index.name} must map each weight to its file"
    with refusing(index, rule, CheckpointError):
        weight_map = as_type(read_json(index, rule, CheckpointError)["weight_map"], Mapping[str, str], "weight_map")
        shards = sorted(set(weight_map.values()))
        for name in shards:
            if not _is_inside(name):
                raise CheckpointError(f"a shard must be a file in the model's folder, got {short(name)} in {index}")
    return shards


def _is_inside(name: str) -> bool:
    """Return whether a name is a plain file name, without path components on any operating system."""
    return name not in ("", ".", "..") and not re.search(r"[/\\:\0]", name)


def _weight_bytes(folder: Path) -> int:
    names = (".safetensors", *_PICKLED)
    return sum(file.stat().st_size for file in folder.iterdir() if file.name.endswith(names) and file.is_file())


def _pickle_refusal(name: str, file: str) -> str:
    return (
        f"weights must be .safetensors, which cannot contain code, got {name} with {file}, a pickle, which can run "
        "code when it is loaded; save the model again with model.save_pretrained(FOLDER), or, if you trust its source, "
        "allow pickles (allow_pickle=True)"
    )


def _check_weights_file(config: Any, name: str, allow_pickle: bool) -> None:
    """Check a weights file named in a config, which transformers would load regardless of `use_safetensors`."""
    named = getattr(config, "transformers_weights", None)
    if named is not None and not (isinstance(named, str) and _is_inside(named)):
        raise CheckpointError(
            f"weights must be a file in the model's folder, got {short(named)} in the config of {name}"
        )
    if named is not None and not str(named).endswith((".safetensors", ".safetensors.index.json")) and not allow_pickle:
        raise CheckpointError(_pickle_refusal(name, str(named)))


def check_kernels(config: Any, name: str, trust_remote_code: bool) -> None:
    """Raise if a config names an attention kernel on the hub, whose code transformers would download and run."""
    for part in (config, *(getattr(config, inner, None) for inner in config.sub_configs)):
        implementation = getattr(part, "_attn_implementation", None)
        if isinstance(implementation, str) and "/" in implementation and not trust_remote_code:
            raise OptionError(
                f"{name} names {short(implementation)} as its attention, code from the hub that would run on this "
                "machine; remove it from config.json, or, if you trust it, allow it (trust_remote_code=True)"
            )


def _model_class(config: Any, name: str, trust_remote_code: bool, *, from_gguf: bool) -> Any:
    """Return the class that the checkpoint was saved from, including its language modelling head or classifier."""
    import transformers

    if from_gguf:
        return transformers.AutoModelForSeq2SeqLM if config.is_encoder_decoder else transformers.AutoModelForCausalLM
    remote = getattr(config, "auto_map", None) or {}
    if trust_remote_code and remote:
        return getattr(transformers, next((auto for auto in _AUTO_CLASSES if auto in remote), "AutoModel"))
    architectures = config.architectures or []
    if not architectures:
        return transformers.AutoModel
    model_class = getattr(transformers, _masked_lm_class_name(architectures[0], config.model_type), None)
    if not (isinstance(model_class, type) and issubclass(model_class, transformers.PreTrainedModel)):
        raise OptionError(
            f"{name} is a {architectures[0]}, which transformers {transformers.__version__} does not know; "
            + ("it requires custom code: if you trust it, allow it (trust_remote_code=True)"
               if remote else "a newer version of transformers may")
        )  # fmt: skip
    return model_class


def _masked_lm_class_name(architecture: str, model_type: str) -> str:
    """Return the masked-LM class name for a pretraining class, which has more outputs, else the given name."""
    from transformers.models.auto import modeling_auto as auto

    saved_from_pretraining = architecture == auto.MODEL_FOR_PRETRAINING_MAPPING_NAMES.get(model_type)
    predicts_next = architecture in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    masked = auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES.get(model_type)
    if saved_from_pretraining and not predicts_next and isinstance(masked, str):
        return masked
    return architecture


def _check_complete(report: Any, name: str, model_class: str) -> None:
    """Raise for parameters missing from a checkpoint, which would be random; a pooler may be missing.

    No attention head depends on the pooler.
    """
    mismatched = sorted(
        f"{key} {list(saved)} instead of {list(expected)}" for key, saved, expected in report["mismatched_keys"]
    )
    if mismatched:
        raise CheckpointError(
            f"the weights of {name} must have the shapes given by its config.json, got {_shorten(mismatched)}; "
            "the folder mixes two models"
        )
    missing = sorted(key for key in report["missing_keys"] if "pooler" not in key.split("."))
    if missing:
        raise CheckpointError(
            f"the weights of {name} must cover all parameters of {model_class}, got none for {len(missing)}: "
            + _shorten(missing)
        )


def _shorten(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def load_tokenizer(source: ModelSource, options: dict[str, Any]) -> Any:
    """Load the tokenizer of a text model; raise if it is missing or has no vocabulary."""
    import transformers

    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(source.location, **options)
    except (OSError, ValueError, KeyError) as error:
        if "trust_remote_code" in str(error) or not source.is_local:
            raise
        raise OptionError(_tokenizer_rule(source.name, "none that transformers can read")) from error
    # If files are missing, transformers may create a tokenizer that only has special tokens.
    if len(tokenizer) <= len(tokenizer.all_special_ids):
        raise OptionError(_tokenizer_rule(source.name, "one without a vocabulary"))
    return tokenizer


def _tokenizer_rule(name: str, got: str) -> str:
    return (
        f"a text model needs its tokenizer, got {name} with {got}; "
        "save it with the model: tokenizer.save_pretrained(FOLDER)"
    )


def kind_of(model: Any) -> Kind:
    """Return the kind of a transformers model, from its class, its config and whether it can generate."""
    from transformers.models.auto import modeling_auto as auto

    config = model.config
    causal, masked = auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    custom_masked_class = (getattr(config, "auto_map", None) or {}).get("AutoModelForMaskedLM", "")
    if config.is_encoder_decoder:
        return "encoder-decoder"
    if type(model).__name__ in (*masked.values(), custom_masked_class.rpartition(".")[2]):
        return "masked"
    if model.can_generate():
        return "causal"
    # Many encoders can be configured as decoders; a family without a masked-LM class is a decoder.
    only_causal = config.model_type in causal and config.model_type not in masked
    return "decoder" if only_causal or getattr(config, "is_decoder", False) else "encoder"


def trained_context(model: Any, tokenizer: Any) -> int | None:
    """Return the maximum context length according to the model's config or tokenizer; None if unknown."""
    return min(_limits(model, tokenizer), default=None)


def _limits(model: Any, tokenizer: Any) -> Iterator[int]:
    config = model.config.get_text_config()
    for attribute in ("max_position_embeddings", "n_positions", "max_target_positions"):
        limit = getattr(config, attribute, None)
        if isinstance(limit, int) and limit > 0:
            yield limit
    # RoBERTa's position table starts with rows for padding, so fewer tokens fit than it has rows.
    for path, module in model.named_modules():
        if path.endswith("position_embeddings") and isinstance(module, nn.Embedding) and module.padding_idx is not None:
            yield module.num_embeddings - module.padding_idx - 1
    # transformers uses a huge number for tokenizers without a limit.
    if tokenizer is not None and tokenizer.model_max_length < 10**9:
        yield int(tokenizer.model_max_length)
