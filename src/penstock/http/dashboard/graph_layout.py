"""Where the parts of a graph stand: in layers from left to right, with few crossings of the lines between them.

The method is that of Sugiyama, Tagawa and Toda (Methods for Visual Understanding of Hierarchical System Structures, 1981). A
part stands one layer behind the last one after which it comes (the longest path). A line that passes layers has a bend in each
of them. The order of a layer follows from the mean places of the neighbours, in the layers before and behind in turn, and the
order with the fewest crossings is kept. At last each layer comes as near to its neighbours as its order and the distances allow,
which is an isotonic regression. No input or output.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

WIDTH = 212.0
HEIGHT = 62.0
_BETWEEN_LAYERS = 56.0
_BETWEEN_PARTS = 16.0
_BEND = 6.0
_PASSES = 8
MOST_PARTS = 300
MOST_LINES = 1_000
MOST_BENDS = 2_000


@dataclass(frozen=True, slots=True)
class Layout:
    """A graph that has been laid out.

    Attributes:
        places: Left upper corner of each part.
        lines: The path of each line, as SVG writes paths.
        width: Width of the whole.
        height: Height of the whole.
        part_width: Width of each part.
        part_height: Height of each part.
    """

    places: tuple[tuple[float, float], ...]
    lines: tuple[str, ...]
    width: float
    height: float
    part_width: float = WIDTH
    part_height: float = HEIGHT


def layers_of(after: Sequence[Sequence[int]]) -> list[int]:
    """The layer of each part, from 0, where each comes after parts with lower numbers."""
    layers: list[int] = []
    for befores in after:
        layers.append(max((layers[before] + 1 for before in befores), default=0))
    return layers


@lru_cache(maxsize=128)
def lay_out(after: tuple[tuple[int, ...], ...]) -> Layout | None:
    """Lay a graph out.

    Args:
        after: For each part the numbers of those after which it comes, which are lower, from 0.

    Returns:
        Its layout; None: it is too large to be looked at.
    """
    layers = layers_of(after)
    lines = sum(map(len, after))
    bends = sum(layers[part] - layers[before] - 1 for part, befores in enumerate(after) for before in befores)
    if not 0 < len(after) <= MOST_PARTS or lines > MOST_LINES or bends > MOST_BENDS:
        return None
    graph = _Graph(after, layers)
    graph.order()
    middles = graph.middles()
    top = min(middle - graph.height(node) / 2 for node, middle in enumerate(middles))
    middles = [middle - top for middle in middles]
    return Layout(
        tuple((_left(layers[part]), middles[part] - HEIGHT / 2) for part in range(len(after))),
        tuple(_path([(graph.layer[node], middles[node]) for node in line]) for line in graph.lines),
        _left(max(layers)) + WIDTH,
        max(middle + graph.height(node) / 2 for node, middle in enumerate(middles)),
    )


class _Graph:
    """A graph with its bends, which are nodes as its parts are, behind these.

    Args:
        after: See `lay_out`.
        layers: The layer of each part.
    """

    def __init__(self, after: Sequence[Sequence[int]], layers: Sequence[int]) -> None:
        self.parts = len(after)
        self.layer = list(layers)
        self.before: list[list[int]] = [[] for _ in after]
        self.behind: list[list[int]] = [[] for _ in after]
        self.lines: list[list[int]] = []
        for part, befores in enumerate(after):
            for before in befores:
                self._connect(before, part)
        self.nodes: list[list[int]] = [[] for _ in range(max(layers) + 1)]
        for node, layer in enumerate(self.layer):
            self.nodes[layer].append(node)

    def height(self, node: int) -> float:
        """The height of a node."""
        return HEIGHT if node < self.parts else _BEND

    def order(self) -> None:
        """Order the nodes of each layer so that few lines cross."""
        best, fewest = [list(nodes) for nodes in self.nodes], self._crossings()
        for one_pass in range(_PASSES):
            if not fewest:
                break
            forwards = one_pass % 2 == 0
            order = self.nodes[1:] if forwards else self.nodes[-2::-1]
            neighbours = self.before if forwards else self.behind
            for nodes in order:
                place = self._places()
                nodes.sort(key=_mean_of(neighbours, place))
            crossings = self._crossings()
            if crossings < fewest:
                best, fewest = [list(nodes) for nodes in self.nodes], crossings
        self.nodes = best

    def middles(self) -> list[float]:
        """The middle of each node, from top to bottom."""
        middles = [0.0] * len(self.layer)
        for nodes in self.nodes:
            for node, middle in zip(nodes, self._spaced(nodes, [0.0] * len(nodes)), strict=True):
                middles[node] = middle
        both = [[*before, *behind] for before, behind in zip(self.before, self.behind, strict=True)]
        for layers, neighbours in ((self.nodes, self.before), (self.nodes[::-1], self.behind), (self.nodes, both)):
            for nodes in layers:
                wanted = [_mean_of(neighbours, middles)(node) for node in nodes]
                for node, middle in zip(nodes, self._spaced(nodes, wanted), strict=True):
                    middles[node] = middle
        return middles

    def _connect(self, before: int, part: int) -> None:
        line = [before]
        for layer in range(self.layer[before] + 1, self.layer[part]):
            line.append(len(self.layer))
            self.layer.append(layer)
            self.before.append([])
            self.behind.append([])
        line.append(part)
        for one, following in pairwise(line):
            self.behind[one].append(following)
            self.before[following].append(one)
        self.lines.append(line)

    def _places(self) -> list[float]:
        places = [0.0] * len(self.layer)
        for nodes in self.nodes:
            for place, node in enumerate(nodes):
                places[node] = float(place)
        return places

    def _crossings(self) -> int:
        """How often lines cross: those between two layers that are in another order at one end than at the other."""
        places, crossings = self._places(), 0
        for nodes in self.nodes:
            ends: list[float] = []
            for node in nodes:
                targets = sorted(places[following] for following in self.behind[node])
                crossings += sum(len(ends) - bisect_right(ends, target) for target in targets)
                for target in targets:
                    insort(ends, target)
        return crossings

    def _spaced(self, nodes: Sequence[int], wanted: Sequence[float]) -> list[float]:
        """The middles that are nearest to the wanted ones, in the order of the nodes and with their distances.

        Without the distances, the middles have only to rise: what does not rise comes together at its mean (pool adjacent
        violators).
        """
        offsets = [0.0]
        for one, following in pairwise(nodes):
            offsets.append(offsets[-1] + (self.height(one) + self.height(following)) / 2 + _BETWEEN_PARTS)
        pools: list[tuple[float, int]] = []
        for middle, offset in zip(wanted, offsets, strict=True):
            mean, many = middle - offset, 1
            while pools and pools[-1][0] >= mean:
                other, more = pools.pop()
                mean, many = (mean * many + other * more) / (many + more), many + more
            pools.append((mean, many))
        means = [mean for mean, many in pools for _ in range(many)]
        return [mean + offset for mean, offset in zip(means, offsets, strict=True)]


def _mean_of(neighbours: Sequence[Sequence[int]], places: Sequence[float]) -> Callable[[int], float]:
    """The mean place of the neighbours of a node; its own, where it has none."""

    def mean(node: int) -> float:
        found = neighbours[node]
        return sum(places[one] for one in found) / len(found) if found else places[node]

    return mean


def _left(layer: int) -> float:
    return layer * (WIDTH + _BETWEEN_LAYERS)


def _path(nodes: Sequence[tuple[int, float]]) -> str:
    """A line through nodes, of which each has a layer and a middle: it crosses layers straight, and bends between them."""
    half = _BETWEEN_LAYERS / 2
    (layer, middle), *others = nodes
    x = _left(layer) + WIDTH
    path = f"M{x:.1f} {middle:.1f}"
    for place, (layer, following) in enumerate(others, 1):
        left = _left(layer)
        path += f"C{x + half:.1f} {middle:.1f} {left - half:.1f} {following:.1f} {left:.1f} {following:.1f}"
        x, middle = left, following
        if place < len(others):
            x += WIDTH
            path += f"H{x:.1f}"
    return path
