"""`ultrascale config show` and `ultrascale config schema`."""

import argparse
import json

from ultrascale.config import collect
from ultrascale.config.load import load
from ultrascale.config.render import to_yaml
from ultrascale.config.resolve import smallest_world
from ultrascale.config.schema import json_schema


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The sub-commands of `ultrascale config`."""
    commands = parser.add_subparsers(dest="config_command", metavar="COMMAND", required=True)

    summary = "the resolved config, checked, and where each value came from"
    show = commands.add_parser(
        "show",
        help=summary,
        description=f"Print {summary}.",
        epilog="example:\n  ultrascale config show --config configs/debug.yaml run.steps=50 --world 8",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    show.add_argument("--config", required=True, metavar="F", help="config file (YAML)")
    show.add_argument("overrides", nargs="*", metavar="a.b=value", help="keys to set over the file's")
    show.add_argument("--world", type=_processes, metavar="N", help="processes (default: as many as the axes need)")
    show.add_argument("--json", action="store_true", help="print JSON instead")

    summary = "the JSON Schema of config files, for editors"
    schema = commands.add_parser(
        "schema",
        help=summary,
        description=f"Print {summary}.",
        epilog="example:\n  ultrascale config schema > configs/schema.json",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    schema.add_argument("--json", action="store_true", help="as it is: a schema is JSON")


def run(arguments: argparse.Namespace) -> int:
    """Exit code 0. Raises ConfigError."""
    if arguments.config_command == "schema":
        print(json.dumps(json_schema(), indent=2, ensure_ascii=False))
        return 0

    loaded = load(arguments.config, arguments.overrides)
    world_size = smallest_world(loaded.config) if arguments.world is None else arguments.world
    config = collect.check(loaded, world_size)
    origins = collect.origins(loaded, config)
    if arguments.json:
        shown = {
            "world_size": world_size,
            "config": config.model_dump(mode="json"),
            "origins": origins,
            "notices": loaded.notices,
        }
        print(json.dumps(shown, indent=2))
        return 0
    print(f"# {loaded.path} on {world_size} process{'' if world_size == 1 else 'es'}")
    for notice in loaded.notices:
        print(f"# notice: {notice}")
    print(to_yaml(config, origins), end="")
    return 0


def _processes(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} processes cannot run anything; use 1 or more")
    return number
