"""The verbs beside the stages: `doctor`, `targets` and `fetch`."""

from pathlib import Path
from typing import Annotated

import typer

from dayzero.core.records import record_json, to_dict
from dayzero.terminal import DeviceOption, JsonOption, app, say, show


@app.command()
def doctor(device: DeviceOption = None, as_json: JsonOption = False) -> int:
    """What this machine, its torch and its device plugins can do, and what is missing."""
    from dayzero.devices.doctor import doctor_table, examine

    found = examine(device)
    show(as_json, record_json(found), lambda: doctor_table(found))
    return 0 if found.ok else 2


targets_app = typer.Typer(
    invoke_without_command=True, help="List the accelerators that ship as hardware files, or measure one."
)
app.add_typer(targets_app, name="targets")


@targets_app.callback()
def targets(context: typer.Context, as_json: JsonOption = False) -> int | None:
    if context.invoked_subcommand is not None:
        return None
    from dayzero.devices.targets import list_targets
    from dayzero.report.text import targets_table

    listed = list_targets()
    show(as_json, {"schema": "dayzero.targets/1", "targets": [to_dict(one) for one in listed]}, lambda: targets_table(listed))
    return 0


@targets_app.command("measure")
def targets_measure(
    file: Annotated[Path, typer.Option("--out", help="the hardware file to write")] = Path("target.yaml"),
    device: Annotated[str, typer.Option(help="a torch device string")] = "cpu",
    devices: Annotated[int | None, typer.Option(help="measure links between so many (default: all; 2 on the CPU)")] = None,
    backend: Annotated[str | None, typer.Option(help="the collective back end, such as nccl, hccl or gloo")] = None,
    as_json: JsonOption = False,
) -> int:
    """Measure a device of this machine and the links between such devices, and write its hardware file."""
    from dayzero.devices.link_fit import link_lines
    from dayzero.devices.measure import measure_cpu, measure_device
    from dayzero.devices.measure_links import measure_links, with_links
    from dayzero.devices.targets import write_target

    target = measure_cpu() if device == "cpu" else measure_device(device)
    target = with_links(target, measure_links(device, devices, backend=backend))
    write_target(target, file)
    show(as_json, record_json(target), lambda: "\n".join([f"{file}: {target.id}", *link_lines(target.links)]))
    return 0


@app.command()
def fetch(
    name: Annotated[str, typer.Argument(help="a model that can be fetched, such as smollm2")],
    out_folder: Annotated[Path | None, typer.Option("--out", help="the release folder to write")] = None,
    as_json: JsonOption = False,
) -> int:
    """Get a small real model as an ordinary Hugging Face folder."""
    from dayzero.progress import bytes_progress
    from dayzero.weights.fetch import fetch as fetch_model

    with bytes_progress(say) as progress:
        folder = fetch_model(name, out_folder or Path("models") / name, progress=progress)
    show(as_json, {"schema": "dayzero.fetch/1", "name": name, "folder": str(folder)}, lambda: str(folder))
    return 0
