"""What the policy knows, in sentences: what is followed, and what other sizes would hit.

From the plain dict that travels in Stats.policy. Must not be here: how it was found out.
"""

from __future__ import annotations

from typing import Any

SIZES = {0.5: "half of", 2.0: "twice", 4.0: "four times"}


def sentences(policy: dict[str, Any], place: str) -> list[str]:
    """For people; `place` is what there would be more of, as "disk". Nothing without shadows."""
    curves: dict[str, list[dict[str, Any]]] = policy.get("curves", {})
    if policy.get("name") != "auto":
        return []
    changes = f"{policy['switches']} change{'' if policy['switches'] == 1 else 's'} so far"
    found = [f"policy auto follows {policy['following']}, {changes}."]
    if not curves:
        return [*found, "The store was not full yet: any policy would have hit the same."]
    what = "pages asked for" if policy["objective"] == "hits" else f"{policy['objective']} to save"
    mine = _by_factor(curves[policy["following"]])
    for factor, name in SIZES.items():
        points = 100 * (mine[factor] - mine[1.0])
        word = "more" if points >= 0 else "fewer"
        found.append(
            f"With {name} the {place} you would hit {abs(points):.1f} points {word} "
            f"({100 * mine[factor]:.1f} % of the {what}, {100 * mine[1.0]:.1f} % now)."
        )
    others = [
        f"{name} {100 * _by_factor(points)[1.0]:.1f} %"
        for name, points in curves.items()
        if name != policy["following"]
    ]
    return [*found, f"Others at this size: {', '.join(others)}."]


def _by_factor(points: list[dict[str, Any]]) -> dict[float, float]:
    return {each["factor"]: each["hit_ratio"] for each in points}
