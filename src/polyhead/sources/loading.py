"""How transformers is made to load without a word, and its failures to say one line that helps."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from polyhead.errors import CheckpointError, OptionError, PolyheadError
from polyhead.files import in_one_line

_NO_CONVERSION = "DISABLE_SAFETENSORS_CONVERSION"


@contextmanager
def quiet(*, progress: bool) -> Iterator[None]:
    """Silence what transformers writes while it loads, and put its settings back afterwards.

    For a hub model without safetensors, transformers would ask a service to convert it; that is switched off as well,
    since looking at a model must not change anything on the hub.
    """
    from huggingface_hub.utils import logging as hub_logging
    from transformers import modeling_gguf_pytorch_utils as gguf
    from transformers.utils import logging

    verbosity, bars, hub_verbosity = (
        logging.get_verbosity(),
        logging.is_progress_bar_enabled(),
        hub_logging.get_verbosity(),
    )
    gguf_bar, conversion = gguf.tqdm, os.environ.get(_NO_CONVERSION)
    logging.set_verbosity_error()
    os.environ[_NO_CONVERSION] = "1"
    if not progress:
        hub_logging.set_verbosity_error()  # it tells of every attempt to reach the hub
        gguf.tqdm = logging.tqdm  # the one bar of transformers that its own switch does not reach
        if bars:
            logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        hub_logging.set_verbosity(hub_verbosity)
        gguf.tqdm = gguf_bar
        if bars and not progress:
            logging.enable_progress_bar()
        if conversion is None:
            del os.environ[_NO_CONVERSION]
        else:
            os.environ[_NO_CONVERSION] = conversion


@contextmanager
def describe_failure(name: str, location: str, *, local: bool) -> Iterator[None]:
    """Turn what transformers and the hub raise while loading into an error of one line."""
    from safetensors import SafetensorError

    try:
        yield
    except PolyheadError:
        raise
    except SafetensorError as error:
        raise CheckpointError(
            f"the weights of {name} must be whole .safetensors files, got: {in_one_line(error)}"
        ) from error
    except ImportError as error:
        raise OptionError(f"{name} needs a package that is not installed: {in_one_line(error)}") from error
    except Exception as error:  # what a damaged config makes of transformers' code is of any kind
        raise _failure(error, name, location, local) from error


def _failure(error: Exception, name: str, location: str, local: bool) -> PolyheadError:
    kinds = {type(cause).__name__ for cause in _causes(error)}
    words = " ".join(str(cause) for cause in _causes(error))
    if "trust_remote_code" in words or "custom code" in words:
        return OptionError(
            f"{name} comes with code of its own, which would run on this machine; read it at "
            f"{location if local else 'https://huggingface.co/' + name} and, if you trust it, allow it "
            "(trust_remote_code=True)"
        )
    if not local:
        if "GatedRepoError" in kinds:
            return OptionError(
                f"{name} is a gated model: accept its terms at https://huggingface.co/{name}, then log in with: "
                "hf auth login"
            )
        if "RepositoryNotFoundError" in kinds:
            return OptionError(
                f"there is no model {name} on the Hugging Face hub and no folder of that name here; "
                "for a private model log in with: hf auth login"
            )
        if "cannot be loaded with `safetensors`" in words:
            return CheckpointError(
                f"weights must be .safetensors, which hold numbers only, got {name} without any on the hub; "
                "if you trust where it came from, allow pickles (allow_pickle=True)"
            )
        if kinds & {"LocalEntryNotFoundError", "OfflineModeIsEnabled", "ConnectError", "ConnectionError"}:
            return OptionError(
                f"the Hugging Face hub cannot be reached and {name} is not in its cache; "
                "name a folder on this machine, or leave the model out to use the packaged minilm"
            )
    return CheckpointError(f"{name} cannot be loaded: {in_one_line(error)}")


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__ or seen.__context__
