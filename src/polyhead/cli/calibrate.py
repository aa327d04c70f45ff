"""`polyhead plan calibrate`: measure this machine, and save it for the predictions of `polyhead plan`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from polyhead.cli.options import optional
from polyhead.cli.progress_bars import ProgressBars
from polyhead.errors import OptionError


def calibrate(
    output: Annotated[
        Path | None,
        optional("Save the machine to this file. [default: in the folder of your machines]", metavar="FILE.json"),
    ] = None,
) -> None:
    """Measure this machine, its GPU if it has one, for the predictions of `polyhead plan` (minutes).

    The machine is saved under the name of its processor, and `polyhead plan MODEL --machine NAME` predicts for it.
    Leave the machine idle meanwhile. A model's folder of the name calibrate is planned as `polyhead plan ./calibrate`.
    """
    from polyhead.costs.timing.machine_files import RULE, check_own_folder
    from polyhead.files import read_json
    from polyhead.observation.run_folder import check_file

    if output is None:
        check_own_folder()
    else:
        check_file(output, "--output")
        if output.suffix != ".json":
            raise OptionError(f"--output must be a .json file, got {output}")
        if output.exists() and "samples" not in read_json(output, RULE):
            raise OptionError(f"--output must be a new file or that of a measured machine, got {output}")

    from polyhead.costs.calibration import calibrate as measure

    with ProgressBars() as progress:
        machine = measure(progress=progress)
    path = machine.save(output)
    name = machine.name if output is None else str(output)
    typer.echo(f"calibrated {machine.name} in {machine.facts.get('seconds', 0):.0f} s, saved to {path}")
    typer.echo(f"predict times for it with: polyhead plan MODEL --machine {shlex.quote(name)}")
