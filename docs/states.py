r"""
# The state of each layer after each event

`frames` derives the states of all layers from the events of a step. `tell` describes one event in a
sentence, and `scenes` describes what happens at the same time.

A ledger records events: a layer starts its all-gather, is whole, computes. The pages draw states: a
layer is a shard, arrives, is whole, computes. Take a layer of 36 bytes on two ranks. After its
event `fetch` the full buffer has its memory, so 36 bytes are held as `unsharding`, and 18 bytes are
in flight to the other rank. After `gathered` the same 36 bytes are held as `whole`, and nothing is
in flight. Each event changes the state of one layer, and the bytes of all states add up to the
memory of the rank:

$$\text{live} = \text{bytes at rest} + \sum_\ell \text{bytes of the state of layer } \ell$$

The tests compare this sum with the bytes that the ledger found in memory, after every event.

**Run this**: `make docs`, and open the page of the tape.

**Not covered, and what that costs**: events of buckets and of offload tiers change no state here.
So a tape is recorded without buckets and tiers. Where activations are is recorded, not derived.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

Json = dict[str, Any]

# The kinds of memory of a rank, from the bottom of the picture to the top.
HELD = ("rest", "reduced", "whole", "unsharding", "gradients", "receive_buffer")
# Scenes without a layer that computes: for several ranks, and for one.
REST = ("Each rank holds its shards and their optimizer states.",
        "The rank holds all parameters and their optimizer states.")
STEP = {"norm": ("The ranks exchange the norms of their gradients.",
                 "The rank computes the norm of its gradients."),
        "step": ("Each rank updates its own shards. Nothing is sent.",
                 "The rank updates all parameters. Nothing is sent.")}

MOVES = {"activations out": "leave", "activations in": "come back"}

# -------------------------------------------------------------------------------------- the frames


def frames(events: list[Json], layers: list[Json], rest_bytes: int,
           receive_buffer: bool) -> list[Json]:
    """
    ## The state of each layer and the communication in flight, after each event

    The first frame is the state before the first event.

    * `layers` have a label, bytes and bytes of a shard
    * `receive_buffer` is true if gradients arrive in the memory of the full parameters

    | field of a layer | value |
    |---|---|
    | `params` | shard, unsharding, whole, or receive_buffer |
    | `busy` | whether the layer computes, in forward or in backward |
    | `grads` | none, filling, full, reducing, reduced, or shard (the shard's gradient alone) |
    | `state` | a summary: shard, unsharding, whole, computing, gradients, reducing, reduced, or |
    | | updated, after the optimizer step |

    `held` is the memory of these states for each kind in `HELD`. Their sum is the ledger's count.
    """
    rest = {"params": "shard", "busy": False, "grads": "none", "state": "shard"}
    states = {layer["label"]: dict(rest) for layer in layers}
    flight: dict[tuple[str, str], Json] = {}
    told = [_frame(states, flight, layers, rest_bytes)]
    for number, e in enumerate(events, start=1):
        name = e["layer"]
        # The norm belongs to the optimizer and not to a layer.
        if name in states:
            _move(states[name], e["event"], receive_buffer)
        # A rank that is alone sends nothing, so nothing is in flight.
        if e["event"] in ("fetch", "reduce") and e["sent_bytes"]:
            flight[name, e["event"]] = {
                "layer": [*states].index(name), "what": e["event"], "bytes": e["sent_bytes"],
                "since": number}
        elif e["event"] in ("gathered", "reduced"):
            flight.pop((name, "fetch" if e["event"] == "gathered" else "reduce"), None)
        told.append(_frame(states, flight, layers, rest_bytes))
    return told


def _move(state: Json, event: str, receive_buffer: bool) -> None:
    """
    #### Change the state of a layer according to an event
    """
    changes: dict[str, Json] = {
        "fetch": {"params": "unsharding"}, "gathered": {"params": "whole"},
        "compute": {"busy": True}, "computed": {"busy": False}, "gradients": {"grads": "filling"},
        "reduce": {"grads": "reducing", "params": "receive_buffer" if receive_buffer else "shard"},
        "reduced": {"grads": "reduced"},
        # A layer frees its parameters first, and the buffers of its reduction later.
        "free": {"params": "shard", "busy": False,
                 "grads": {"filling": "full", "reduced": "shard"}.get(state["grads"], "none")},
    }
    state.update(changes.get(event, {}))
    params = state["params"]
    grads = state["grads"]
    if event == "step":
        state["state"] = "updated"
    elif params == "whole":
        state["state"] = ("gradients" if grads == "filling" else
                          "computing" if state["busy"] else "whole")
    elif params == "unsharding":
        state["state"] = params
    else:
        state["state"] = {"none": "shard", "full": "gradients", "shard": "reduced"}.get(
            grads, grads)


def _frame(states: Json, flight: Json, layers: list[Json], rest_bytes: int) -> Json:
    """
    #### Copy the states, and add up the memory of each kind
    """
    held = dict.fromkeys(HELD, 0) | {"rest": rest_bytes}
    for layer, state in zip(layers, states.values(), strict=True):
        params = state["params"]
        grads = state["grads"]
        if params != "shard":
            held[params] += layer["bytes"]
        has_reduced = grads in ("reduced", "shard")
        held["reduced"] += layer["shard_bytes"] * has_reduced
        # With one rank the shard is the whole layer, and the full gradient becomes the shard's.
        same_memory = has_reduced and layer["bytes"] == layer["shard_bytes"]
        has_full = grads not in ("none", "shard") and not same_memory
        held["gradients"] += layer["bytes"] * has_full
    return {"layers": [dict(state) for state in states.values()], "flight": [*flight.values()],
            "held": held}


# ----------------------------------------------------------------------------------- the sentences


def tell(e: Json, before: Json, labels: list[str], world_size: int) -> str:
    """
    ## Describe an event in a sentence

    * `before` is the frame before the event
    """
    name = e["layer"]
    nbytes = f"{e['bytes']:,} bytes"
    if world_size == 1:
        return _alone(e["event"], name, nbytes) or _plainly(e, before, labels)
    others = "the other rank" if world_size == 2 else f"the {world_size - 1} other ranks"
    to = "the other rank" if world_size == 2 else f"each of {others}"
    sent = f"{e['sent_bytes'] // (world_size - 1):,} bytes"  # to one of them
    return {
        "fetch": f"{name} starts its all-gather; its shard, {sent}, is in flight to {to}",
        "gathered": f"{name} is whole: the shards of {others} have arrived",
        "reduce": f"{name} starts to reduce its gradient; {sent} are in flight to {to}",
        "reduced": f"{name} has the mean gradient of this rank's shard, {nbytes}",
        "norm": f"the ranks exchange the norms of their gradients, {sent} to {to}",
    }.get(e["event"]) or _plainly(e, before, labels)


def _alone(event: str, name: str, nbytes: str) -> str | None:
    """
    #### Describe an event that is another one if there is only one rank
    """
    return {
        "fetch": f"{name} copies its shard into the full buffer, {nbytes}; a rank alone sends "
                 "nothing",
        "gathered": f"{name} is whole, because a rank alone has all of it",
        "reduce": f"{name} reduces its gradient; a rank alone sends nothing",
        "reduced": f"{name} keeps its full gradient, {nbytes}, as that of its shard",
        "norm": "the rank computes the norm of its gradients, and sends nothing",
    }.get(event)


def _plainly(e: Json, before: Json, labels: list[str]) -> str:
    """
    #### Describe an event that does not depend on other ranks
    """
    name = e["layer"]
    nbytes = f"{e['bytes']:,} bytes"
    state = before["layers"][labels.index(name)]
    backward = e["phase"] == "backward"
    if state["params"] == "whole":
        frees = f"frees its full parameters, {nbytes}; its shard stays"
    elif state["params"] == "receive_buffer":
        frees = f"frees its full gradient and the receive buffer, {nbytes}"
    elif e["bytes"]:
        frees = f"frees its full gradient, {nbytes}"
    else:
        frees = "has nothing to free: its gradient stays until the optimizer step"
    return {
        "compute": f"{name} starts {'its backward' if backward else 'to compute'}",
        "computed": f"{name} has finished its forward",
        "gradients": f"{name} allocates its full gradient, {nbytes}, and fills it",
        "free": f"{name} {frees}",
        "activations out": f"the activations of {name}, {nbytes}, begin to leave",
        "activations in": f"the activations of {name}, {nbytes}, begin to come back",
        "step": f"the optimizer has updated this rank's shard of {name}",
    }[e["event"]]


def scenes(events: list[Json], told: list[Json], world_size: int) -> list[tuple[int, str]]:
    """
    ## The sentences that a reader can follow while the tape plays, with their first positions

    A step has a dozen scenes, and a scene has several events. In backward, for example, a layer
    fills its gradient *while* another one is reduced and a third one arrives.

    * `told` are the frames
    """
    begins = [i for i, (before, e) in enumerate(pairwise([{}, *events])) if _begins(before, e)]
    found = [(0, REST[world_size == 1])]
    for first, end in pairwise([*begins, len(events)]):
        reduced = [events[m["since"] - 1]["layer"] for m in told[first]["flight"]
                   if m["what"] == "reduce"]
        found.append((first + 1, _scene(events[first:end], reduced, world_size == 1)))
    return found


def _begins(before: Json, e: Json) -> bool:
    """
    #### Whether a scene begins with this event
    """
    if not before or before["phase"] != e["phase"]:
        return True
    if e["phase"] == "forward":
        return before["event"] == "free"
    if e["phase"] == "backward":
        return e["event"] == "compute"
    return before["event"] == "norm"


def _scene(inside: list[Json], reduced: list[str], alone: bool) -> str:
    """
    #### Describe the events of a scene together

    * `reduced` are the layers whose gradients are in flight when the scene begins
    """
    phase = inside[0]["phase"]
    if phase == "step":
        return STEP[inside[0]["event"]][alone]
    name = next(e["layer"] for e in inside if e["event"] == "compute")
    gathered = [e["layer"] for e in inside if e["event"] == "fetch"]
    ahead = [f"the shards of {short(other)} arrive" for other in gathered if other != name]
    ahead += [f"the gradient of {short(other)} is reduced" for other in reduced]
    own = "is gathered, and then " * (name in gathered)
    moves = [f"the activations of {short(e['layer'])} {MOVES[e['event']]}" for e in inside
             if e["event"] in MOVES]
    does = "computes" if phase == "forward" else "fills its gradient"
    if alone:
        does += f" while {' and '.join(moves)}" * bool(moves)
        return f"{short(name).capitalize()} {does}. A rank alone sends nothing."
    ahead += moves
    if own and not ahead:
        does += " and reduces it" * (phase == "backward")
        return f"{short(name).capitalize()} {own}{does}. Nothing overlaps."
    # The last layer of a chain stays full, because backward begins with it.
    if phase == "forward" and all(e["event"] != "free" for e in inside):
        does += " and stays whole for backward"
    if ahead:
        does += f" while {', '.join(ahead[:-1])}{' and ' * (len(ahead) > 1)}{ahead[-1]}"
    return f"{short(name).capitalize()} {own}{does}."


def short(label: str) -> str:
    """
    ## The label of a layer without its class
    """
    return label.partition(" (")[0]


def moments(events: list[Json], told: list[Json]) -> dict[str, int]:
    """
    ## The positions of events that are worth a look

    * `overlap`: a layer computes in forward while the next one is in flight
    * `stays`: the last layer has finished its forward
    * `reduce`: a layer fills its gradient while that of another layer is in flight
    * `peak`: the memory is highest
    * `leave`, `come`: activations leave, and come back, if they do
    """
    def first(found: Iterator[int]) -> int:
        return next(found, 0)

    numbered = [*enumerate(zip(events, told[1:], strict=True), start=1)]
    peak_bytes = max(e["live_bytes"] for e in events)
    forward = [i for i, (e, _) in numbered if e["phase"] == "forward"]
    return {
        "overlap": first(i for i, (e, f) in numbered if f["flight"] and e["event"] == "compute"
                         and e["phase"] == "forward" and e["layer"] != events[0]["layer"]),
        "stays": forward[-1],
        "reduce": first(i for i, (e, f) in numbered if e["event"] == "gradients"
                        and any(m["what"] == "reduce" for m in f["flight"])),
        "peak": first(i for i, (e, _) in numbered if e["live_bytes"] == peak_bytes),
        "leave": first(i for i, (e, _) in numbered if e["event"] == "activations out"),
        "come": first(i for i, (e, _) in numbered if e["event"] == "activations in"),
    }
