"""Colours of the pictures: one hue per kind of action, lighter and darker by virtual stage or direction.

The hues are of the palette of Okabe and Ito (2008), which people with any form of colour vision can tell apart.
"""

from __future__ import annotations

from ultrascale.pipeline.actions import Kind

Colour = tuple[int, int, int]

HUES: dict[Kind, Colour] = {
    Kind.F: (0x56, 0xB4, 0xE9),
    Kind.B: (0xE6, 0x9F, 0x00),
    Kind.BI: (0xCC, 0x79, 0xA7),
    Kind.BW: (0x00, 0x9E, 0x73),
}
WORDS: dict[Kind, str] = {
    Kind.F: "forward (F)",
    Kind.B: "backward (B)",
    Kind.BI: "input gradient (BI)",
    Kind.BW: "weight gradient (BW)",
}
_LIGHTEST, _DARKEST = 0.45, -0.42


def shade(kind: Kind, variant: int, variants: int) -> str:
    """`#rrggbb` of a kind of action; the first of several variants is the lightest."""
    amount = _LIGHTEST + (_DARKEST - _LIGHTEST) * variant / (variants - 1) if variants > 1 else 0.15
    target = 255 if amount > 0 else 0
    mixed = (round(part + (target - part) * abs(amount)) for part in HUES[kind])
    return "#" + "".join(f"{part:02x}" for part in mixed)


def ink(background: str) -> str:
    """Black or white, whichever is read better on a `#rrggbb` (WCAG 2 relative luminance)."""
    channels = [int(background[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "#000000" if luminance > 0.179 else "#ffffff"
