"""Callbacks of transformers' `Trainer` and of Lightning that end the steps of a monitor and save its state."""

from __future__ import annotations

import base64
import io
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from polyhead.errors import OptionError
from polyhead.training.rank_sums import has_ranks

if TYPE_CHECKING:
    from polyhead.training.monitor import HeadMonitor

LATE = 2  # steps after which a request of another process is read


class Requests:
    """Requests of a monitor's callbacks to the loop, the same in all processes.

    In a process group all processes act on a request of any of them, two steps later, so that none waits.

    Args:
        monitor: the monitor.
    """

    def __init__(self, monitor: HeadMonitor) -> None:
        self.monitor = monitor
        self._pending: deque[tuple[Tensor, Any]] = deque()

    def start(self) -> None:
        """Withdraw the requests of an earlier loop, in all processes."""
        self.monitor.reset_stop()
        self._pending.clear()

    def take(self) -> tuple[bool, bool]:
        """Return whether to stop, and whether to save; a request to save is returned once."""
        callbacks = self.monitor.callbacks
        requested = any(x.should_stop for x in callbacks), any(x.should_save for x in callbacks)
        for callback in callbacks:
            callback.should_save = False
        if not has_ranks():
            return requested
        device = next(self.monitor.model.parameters()).device
        flags = torch.stack([torch.full((), x, dtype=torch.int32, device=device) for x in requested])
        torch.distributed.all_reduce(flags, torch.distributed.ReduceOp.MAX)
        event = None
        if flags.is_cuda:
            host = torch.empty_like(flags, device="cpu", pin_memory=True)
            flags, event = host.copy_(flags, non_blocking=True), torch.cuda.Event()
            event.record(torch.cuda.current_stream(device))
        self._pending.append((flags, event))
        if len(self._pending) <= LATE:
            return False, False
        flags, event = self._pending.popleft()
        if event is not None:
            event.synchronize()
        stop, save = flags.tolist()
        return bool(stop), bool(save)


def start(monitor: HeadMonitor, step: int) -> None:
    """Check that a monitor is at the step of a loop that was resumed; one without a state starts there.

    Args:
        monitor: the monitor.
        step: number of steps that the loop has finished.
    """
    if step and not monitor.steps:
        monitor.start_at(step)
    if step and monitor.steps != step:
        raise OptionError(
            f"a monitor continues at the step of its loop, got a monitor after {monitor.steps} steps and a checkpoint "
            f"of step {step}; create another monitor for a resumed run"
        )


def take_scaler(monitor: HeadMonitor, scaler: object) -> None:
    """Pass the scaler of a trainer's loss to a monitor that has none.

    Args:
        monitor: the monitor.
        scaler: what the trainer has as its scaler.
    """
    if monitor.grad_scaler is None and isinstance(scaler, torch.amp.GradScaler):
        monitor.grad_scaler = scaler


def trainer_callback(monitor: HeadMonitor) -> Any:
    """Return a `transformers.TrainerCallback`; see `HeadMonitor.trainer_callback`.

    Args:
        monitor: the monitor.
    """
    from transformers import TrainerCallback, TrainerControl
    from transformers.trainer_callback import ExportableState

    requests = Requests(monitor)

    class HeadMonitorCallback(TrainerCallback, ExportableState):
        def __init__(self) -> None:
            self.hook: Any = None
            self.losses: list[Tensor] = []

        def state(self) -> dict[str, Any]:  # is called while the Trainer writes a checkpoint
            file = io.BytesIO()
            torch.save(monitor.state_dict(), file)
            return {"args": {}, "attributes": {"saved": base64.b64encode(file.getvalue()).decode()}}

        def on_train_begin(self, args: Any, state: Any, control: TrainerControl, **kwargs: Any) -> None:
            take_scaler(monitor, getattr(kwargs.get("optimizer"), "scaler", None))  # of accelerate
            # An entry is missing if the checkpoint was written without a monitor.
            saved = state.stateful_callbacks.setdefault(type(self).__name__, None)
            if isinstance(saved, list):
                raise OptionError("a Trainer takes the callback of one monitor, got several")
            if state.global_step and saved is not None and not monitor.steps:
                content = base64.b64decode(saved["attributes"]["saved"])
                monitor.load_state_dict(torch.load(io.BytesIO(content), weights_only=True))
            start(monitor, state.global_step)
            monitor.discard()  # of a step that an earlier training did not finish
            requests.start()
            monitor.cleanup.callback(self.remove_hook)

        def remove_hook(self) -> None:
            if self.hook is not None:
                self.hook.remove()
                self.hook = None

        def on_step_begin(self, args: Any, state: Any, control: TrainerControl, **kwargs: Any) -> None:
            self.losses = []
            self.remove_hook()  # of a step that ended in an error
            if monitor.is_observing:
                self.hook = kwargs["model"].register_forward_hook(self.keep_loss)

        def keep_loss(self, module: Any, args: Any, output: Any) -> None:
            """Keep the loss that the model returns; the Trainer does not pass on its own.

            Its factor in the loss of the step (the number of micro-batches, of tokens or of processes) is its gradient.
            """
            loss = output.get("loss") if isinstance(output, Mapping) else None
            if monitor.is_observing and module.training and isinstance(loss, Tensor) and loss.requires_grad:
                value, losses = loss.detach().clone(), self.losses  # the Trainer may scale the loss in place
                inverse_scale = monitor.inverse_scale
                loss.register_hook(lambda grad: losses.append((value * grad).sum() * inverse_scale(grad.device)))

        def on_step_end(self, args: Any, state: Any, control: TrainerControl, **_: Any) -> None:
            self.remove_hook()
            monitor.step(torch.stack(self.losses).sum() if self.losses else None)
            stop, save = requests.take()
            control.should_training_stop |= stop
            control.should_save |= save

    return HeadMonitorCallback()


def lightning_callback(monitor: HeadMonitor) -> Any:
    """Return a `lightning.pytorch.Callback`; see `HeadMonitor.lightning_callback`.

    Args:
        monitor: the monitor.
    """
    try:
        from lightning.pytorch import Callback
    except ImportError:
        raise OptionError("lightning_callback needs Lightning; install it with: pip install lightning") from None

    requests = Requests(monitor)

    class HeadMonitorCallback(Callback):
        state_key = "HeadMonitor"

        def __init__(self) -> None:
            self.steps = 0
            self.losses: list[Tensor] = []

        def state_dict(self) -> dict[str, Any]:
            return monitor.state_dict()

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            monitor.load_state_dict(state_dict)

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            take_scaler(monitor, getattr(trainer.precision_plugin, "scaler", None))
            self.steps, self.losses = trainer.global_step, []
            if not monitor.steps:
                start(monitor, self.steps)
            monitor.discard()  # of a step that an earlier training did not finish
            requests.start()

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
            loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
            if isinstance(loss, Tensor):
                # Lightning has divided the loss of a micro-batch, unless the module calls the optimizer itself.
                parts = trainer.accumulate_grad_batches if pl_module.automatic_optimization else 1
                self.losses.append(loss.detach().mean() * parts)
            if trainer.global_step == self.steps:
                return
            self.steps = trainer.global_step
            monitor.step(torch.stack(self.losses).mean() if self.losses else None)
            self.losses = []
            stop, save = requests.take()
            trainer.should_stop |= stop
            if save:
                folder = getattr(trainer.checkpoint_callback, "dirpath", None) or trainer.default_root_dir
                trainer.save_checkpoint(Path(folder) / f"heads-step={self.steps}.ckpt")

    return HeadMonitorCallback()
