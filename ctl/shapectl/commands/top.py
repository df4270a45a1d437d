# SPDX-License-Identifier: Apache-2.0
"""`shapectl top`: the classes live, with their rates, drops and queue delays."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import click

from shapeagent.model.errors import InputError, ShapeError
from shapectl import params
from shapectl.output import print_json, print_line, print_table, rate_text
from shapectl.session import ShapeCommand, complete_device, session_of

if TYPE_CHECKING:
    from rich.console import Console

    from shapeagent.model.rates import InterfaceRates, Sample

_LEAST_INTERVAL_S, _MOST_INTERVAL_S = 0.2, 3600.0

#: Who gives samples; today the engine in this process.
Source = Callable[[], "Sample"]


@click.command("top", cls=ShapeCommand)
@click.argument("device", required=False, shell_complete=complete_device)
@click.option(
    "--interval",
    "interval_s",
    metavar="TIME",
    type=params.duration,
    default="1s",
    help="Time between two looks (200ms to 1h). Default: 1s.",
)
@click.option("--once", is_flag=True, help="Look twice, print the rates between, and end.")
@click.pass_context
def command(ctx: click.Context, device: str | None, interval_s: float, once: bool) -> None:
    """Watch every attached interface, or DEVICE.

    Per class: rate, packets and drops per second, how much of the ceiling in
    force is used, and how long a packet waits in the queue (backlog over the
    rate at which it empties).

    Keys: q quits, space pauses, s sorts by the next column (c, r, k, d, u, y:
    by class, rate, packets, drops, use, delay), e shows one direction, z hides
    what is idle. Ctrl-Z stops it. Colour: not where NO_COLOR is set.
    """
    session = session_of(ctx)
    if not _LEAST_INTERVAL_S <= interval_s <= _MOST_INTERVAL_S:
        raise InputError(
            "bad-interval",
            f"An interval of {interval_s:g} s is not between 200 ms and 1 h.",
            hint="shapectl top --interval 2s",
        )
    if session.json and not once:
        raise InputError("usage", "--json needs --once.", hint="shapectl top --once --json")
    with session.engine() as engine:

        def look() -> Sample:
            from shapeagent.model.rates import Sample

            interfaces = engine.status(device)
            return Sample(time.monotonic(), interfaces)

        if once:
            rates, took_s = _look_twice(look, interval_s)
            if session.json:
                print_json({"interval_s": took_s, "interfaces": rates})
            else:
                _print_rates(rates)
            return
        _watch(look, interval_s)


def _look_twice(look: Source, interval_s: float) -> tuple[tuple[InterfaceRates, ...], float]:
    from shapeagent.model.rates import interface_rates

    first = look()
    time.sleep(interval_s)
    second = look()
    return interface_rates(first, second), round(second.at_s - first.at_s, 6)


def _print_rates(rates: tuple[InterfaceRates, ...]) -> None:
    from shapectl.topview import delay_text, number_text, use_text

    if not rates:
        print_line("shapectl is attached to no interface here.")
    for position, one in enumerate(rates):
        if position:
            print_line()
        place = f" in namespace {one.netns}" if one.netns else ""
        link = rate_text(one.link_rate_bits_per_s or None, none="unknown")
        print_line(f"{one.device}{place}: profile {one.profile}, link {link}")
        print_table(
            (
                *("class", "direction", ">bit/s", ">pkt/s", ">drop/s"),
                *(">ceiling", ">use", ">delay"),
            ),
            [
                (
                    row.name,
                    row.direction,
                    number_text(row.bits_per_s),
                    number_text(row.packets_per_s),
                    number_text(row.drops_per_s),
                    rate_text(row.ceiling_bits_per_s),
                    use_text(row.ceiling_use),
                    delay_text(row.queue_delay_s),
                )
                for row in one.classes
            ],
        )


def _watch(look: Source, interval_s: float) -> None:
    """Show the screen until a key or a signal ends it."""
    from rich.console import Console

    console = Console(highlight=False)
    if not sys.stdout.isatty() or console.is_dumb_terminal:
        raise InputError(
            "not-a-terminal",
            "There is no terminal here to draw on.",
            hint="shapectl top --once, or --once --json for programs",
        )
    code = _loop(look, interval_s, console)
    if code:
        raise SystemExit(code)


def _loop(look: Source, interval_s: float, console: Console) -> int:
    """Return the exit code: 0, or 128 and the number of the signal that ended it."""
    import signal

    from rich.live import Live

    from shapectl.terminal import Keyboard
    from shapectl.topview import Screen, View

    view = View()
    view.take(look())  # what is wrong from the start is an error, not a screen
    next_s = time.monotonic() + interval_s
    with Keyboard() as keyboard:
        while True:
            with Live(console=console, screen=True, auto_refresh=False) as live:
                while True:
                    # the pty's size may have changed since: rich asks at each refresh
                    screen = Screen(view, console.height, clock_text=time.strftime("%H:%M:%S"))
                    live.update(screen, refresh=True)
                    event = keyboard.wait(next_s - time.monotonic())
                    if event == "SIGTSTP":
                        break
                    if event in ("SIGTERM", "SIGHUP"):
                        return 128 + signal.Signals[event].value
                    if event == "SIGINT" or not view.press(event):
                        return 0
                    if time.monotonic() >= next_s:
                        next_s = max(next_s + interval_s, time.monotonic())
                        try:
                            view.take(look())
                        except ShapeError as error:  # it may be attached again: go on looking
                            view.problem = error.message
            keyboard.stop()
