// The tape: one recorded training step, to move through event by event.
//
// `tape.py` records the step and calculates the state after each event. This script has what all
// views of it share: `load` loads a recording, a `Player` has the position in it, and `drawMemory`,
// `drawLayers` and `controls` draw. The views are `tape-page.js` (the page), `tape-index.js` (the
// first page) and `tape-dock.js` (beside the source).
//
// Position 0 is the state before the first event, and position i the state after the i-th.
const Tape = (() => {
  "use strict";

  // ---------------------------------------------------------------------------------- elements

  const SVG = "http://www.w3.org/2000/svg";

  function fill(node, attributes, children) {
    for (const [key, value] of Object.entries(attributes || {})) {
      if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
      else if (value !== null && value !== false) node.setAttribute(key, value);
    }
    // Children are nodes and texts, in lists of any depth. Texts are never read as HTML.
    node.append(...[children === undefined ? [] : children].flat(Infinity));
    return node;
  }
  const el = (tag, attributes, children) => fill(document.createElement(tag), attributes, children);
  const s = (tag, attributes, children) =>
    fill(document.createElementNS(SVG, tag), attributes, children);
  const button = (label, onclick, more) =>
    el("button", { type: "button", onclick, ...more }, label);

  const number = n => n.toLocaleString("en-US");
  const bytes = n => `${number(n)} bytes`;
  const sum = numbers => numbers.reduce((a, b) => a + b, 0);
  const capital = text => text[0].toUpperCase() + text.slice(1);
  // The page of a source file in `zero3`, as `page_of` in `build.py` names it.
  const pageOf = file => file.replace("/", "-").replace(/\.py$/, ".html");
  const still = () => matchMedia("(prefers-reduced-motion: reduce)").matches;

  // ----------------------------------------------------------------------------------- colours

  // The kinds of memory, in the order of `HELD` in `states.py`: colour and name of each.
  const HELD = {
    rest: ["shard", "shards, optimizer states"],
    reduced: ["reduced", "gradients of shards"],
    whole: ["whole", "whole layers"],
    unsharding: ["flight", "layers that arrive"],
    gradients: ["grad", "full gradients"],
    receive_buffer: ["reduce", "receive buffers"],
  };
  // A shard is darker than a whole layer, because their blues are alike.
  const OPACITY = { shard: .75, reduced: .75, whole: .45, grad: .75 };
  // Stripes mean "in flight", so that it is visible without colours, too.
  const STRIPED = ["flight", "reduce", "moving"];
  // Activations have the colour of files.
  const color = name => `var(--c-${name === "moving" ? "file" : name})`;
  const paint = name => STRIPED.includes(name) ? `fill:url(#tape-${name})` :
    `fill:${color(name)};fill-opacity:${OPACITY[name] || 1}`;

  function addPatterns() {
    if (document.getElementById("tape-flight")) return;
    const pattern = name => s("pattern", { id: `tape-${name}`, width: 6, height: 6,
      patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" }, [
      s("rect", { width: 6, height: 6, style: `fill:${color(name)};fill-opacity:.2` }),
      s("rect", { width: 2.5, height: 6, style: `fill:${color(name)}` })]);
    document.body.append(s("svg", { width: 0, height: 0, "aria-hidden": true,
      style: "position:absolute" }, s("defs", {}, STRIPED.map(pattern))));
  }

  // -------------------------------------------------------------------------------- recordings

  // Calls `then` with a recording, "2-prefetch" for example. A page that is opened from a file may
  // not fetch data, but it may insert a script.
  function load(key, then) {
    const ready = () => then(complete(window.TAPES[key], key));
    if ((window.TAPES || {})[key]) ready();
    else document.head.append(el("script", { src: `tape-${key}.js`, onload: ready }));
  }

  function complete(tape, key) {
    tape.key = key;
    tape.count = tape.events.length;
    tape.live = tape.frames.map(frame => sum(Object.values(frame.held)));
    tape.peak = tape.live.indexOf(tape.peak_bytes);
    // The activations of all layers in memory, and what each layer has saved.
    tape.saved = tape.frames.map(frame => sum(frame.saved.map(one => one ? one.bytes : 0)));
    tape.allSaved = tape.layers.map((_, l) =>
      Math.max(...tape.frames.map(({ saved }) => saved[l] ? saved[l].of : 0)));
    return tape;
  }

  const sceneAt = (tape, index) => tape.scenes.findLastIndex(([first]) => first <= index);

  // The position in another recording that is comparable: the same event of the same layer, or else
  // the same layer in the same phase, or else the beginning of the phase.
  function comparable(tape, index, other) {
    if (index === 0 || index === tape.count) return index && other.count;
    const here = tape.events[index - 1];
    const alike = names => e => names.every(name => e[name] === here[name]);
    const same = alike(["layer", "phase", "event"]);
    const nth = tape.events.slice(0, index).filter(same).length;
    const found = [...other.events.keys()].filter(i => same(other.events[i]));
    if (found.length) return found[Math.min(nth, found.length) - 1] + 1;
    const near = other.events.findIndex(alike(["layer", "phase"]));
    return (near >= 0 ? near : other.events.findIndex(alike(["phase"]))) + 1;
  }

  // ------------------------------------------------------------------------------------ player

  // The position in a recording. It calls `changed(player)` of each view after every change.
  class Player {
    constructor(tape) {
      this.tape = tape;
      this.index = 0;
      this.views = [];
      this.timer = null;
      // Milliseconds to stay at a position while playing.
      this.pace = () => 700;
    }

    get count() { return this.tape.count; }
    get playing() { return this.timer !== null; }
    get event() { return this.index ? this.tape.events[this.index - 1] : null; }
    get frame() { return this.tape.frames[this.index]; }
    // The calls that led to the event, innermost first: file, line, and name of the function.
    get lines() { return this.event ? this.event.lines : []; }
    get phase() { return this.event ? this.event.phase : "between two steps"; }
    get scene() { return this.tape.scenes[sceneAt(this.tape, this.index)][1]; }
    get says() { return this.event ? `${capital(this.event.text)}.` : this.scene; }

    show() { this.views.forEach(changed => changed(this)); }

    go(index) {
      this.index = Math.max(0, Math.min(this.count, Math.round(index)));
      this.show();
    }

    // What a reader does by hand ends the playing.
    jump(index) {
      this.stop();
      this.go(index);
    }

    step(by) { this.jump(this.index + by); }

    play() {
      if (this.playing) return;
      if (this.index === this.count) this.index = 0;
      this.wait();
      this.show();
    }

    wait() {
      // `pace` is asked at the position where the tape stays.
      this.timer = setTimeout(() => {
        const last = this.index + 1 >= this.count;
        if (last) this.timer = null;
        this.go(this.index + 1);
        if (!last) this.wait();
      }, this.pace(this));
    }

    stop() {
      clearTimeout(this.timer);
      this.timer = null;
    }

    toggle() {
      if (!this.playing) return this.play();
      this.stop();
      this.show();
    }

    change(tape) {
      const index = comparable(this.tape, this.index, tape);
      this.tape = tape;
      this.go(index);
    }
  }

  // Plays once as soon as a reader sees it. If motion is unwelcome, it shows the peak and stays
  // still.
  function playOnce(player, node) {
    if (still()) return player.go(player.tape.peak);
    player.show();
    new IntersectionObserver((entries, observer) => {
      if (!entries.some(entry => entry.isIntersecting)) return;
      observer.disconnect();
      if (!player.index) player.play();
    }, { threshold: .6 }).observe(node);
  }

  // -------------------------------------------------------------------------- drawing: memory

  // The memory of a rank, stacked by kind, over the events of the step. Returns the picture, and a
  // function that moves the cursor.
  //
  // `height` is in pixels; `labels` says that phases and levels have names. With names all
  // recordings have the same scale. Without, this one has the height for itself.
  function drawMemory(player, { width, height, labels }) {
    const { tape } = player, count = tape.count, top = labels ? 34 : 4, bottom = height - 1;
    const across = width / (count + 1);
    const scale = (bottom - top) / (1.01 * (labels ? tape.most_bytes : tape.peak_bytes));
    const x = i => +(i * across).toFixed(2), y = n => +(bottom - n * scale).toFixed(2);
    const area = ([kind, edge]) => s("path", { d: edge, style: paint(HELD[kind][0]) });
    const line = "M0," + y(tape.live[0]) + tape.live.map((n, i) => `V${y(n)}H${x(i + 1)}`).join("");
    const phases = drawPhases(tape, x, labels ? 4 : top, bottom);
    const levels = drawLevels(tape, y, width, labels);
    // Later events are pale.
    const veil = s("rect", { y: top, height: bottom - top, style: "fill:var(--bg);opacity:.66" });
    const dot = s("circle", { r: 4.5, class: "tape-dot" });
    const cursor = s("g", { class: "tape-cursor" }, s("path", { d: `M0,${top}V${bottom}` }));
    const at = event => player.jump((event.clientX - picture.getBoundingClientRect().left) / across
      - .5);
    const picture = s("svg", {
      class: "tape-memory", viewBox: `0 0 ${width} ${height}`, width, height, role: "img",
      "aria-label": `Memory of each rank over the ${count} events of one step: ` +
        `${bytes(tape.rest_bytes)} at rest, ${bytes(tape.peak_bytes)} at the peak. ` +
        `Plain data parallel training: ${bytes(tape.data_parallel_bytes)}.`,
      onpointerdown: event => {
        picture.setPointerCapture(event.pointerId);
        at(event);
      },
      onpointermove: event => event.buttons && at(event),
    }, [Object.entries(edges(tape, x, y)).map(area), veil, phases.map(([line]) => line),
      s("path", { d: line, class: "tape-line" }), levels.map(([line]) => line), cursor, dot,
      // Words are over everything, so that the cursor crosses none.
      labels ? [...phases, ...levels].map(([, words]) => words) : []]);
    return [picture, index => {
      veil.setAttribute("x", x(index + 1));
      veil.setAttribute("width", Math.max(0, width - x(index + 1)));
      cursor.style.transform = `translateX(${x(index + .5)}px)`;
      dot.style.transform = `translate(${x(index + .5)}px, ${y(tape.live[index])}px)`;
    }];
  }

  // The outline of the area of each kind of memory.
  function edges(tape, x, y) {
    const floor = tape.frames.map(() => 0), found = {};
    for (const kind of Object.keys(HELD)) {
      // The upper edge goes to the right, and the lower one back.
      let up = "", down = "";
      tape.frames.forEach((frame, i) => {
        const low = floor[i];
        floor[i] += frame.held[kind];
        up += `${i ? "L" : "M"}${x(i)},${y(floor[i])}H${x(i + 1)}`;
        down = `L${x(i + 1)},${y(low)}H${x(i)}` + down;
      });
      found[kind] = up + down + "Z";
    }
    return found;
  }

  // A line where each phase begins, and its name.
  function drawPhases(tape, x, top, bottom) {
    const firsts = tape.events.map((e, i) => [e.phase, i + 1])
      .filter(([phase], i) => !i || phase !== tape.events[i - 1].phase);
    return firsts.map(([phase, i]) => [
      s("path", { d: `M${x(i)},${top}V${bottom}`, class: "tape-phase" }),
      s("text", { x: Math.min(x(i) + 4, x(tape.count + 1) - 27), y: 14, class: "tape-halo" },
        phase)]);
  }

  // Dashed lines at rest, at the peak, and with `plain` at the peak of data parallel training; and
  // their names.
  function drawLevels(tape, y, width, plain) {
    const level = (n, words, name, below) => [
      s("path", { class: "tape-level", d: `M0,${y(n)}H${width}`, style: `stroke:${name}` }),
      s("text", { x: 4, y: y(n) + (below ? 14 : -5), class: "tape-halo" },
        `${words}: ${bytes(n)}`)];
    const parallel = () =>
      level(tape.data_parallel_bytes, "plain data parallel, peak", "var(--muted)", true);
    return [...plain ? [parallel()] : [],
      level(tape.peak_bytes, "predicted peak", color("grad"), false),
      level(tape.rest_bytes, "predicted at rest", color("shard"), true)];
  }

  // -------------------------------------------------------------------------- drawing: layers

  const WORDS = { shard: "", unsharding: "arrives", whole: "whole", computing: "runs",
    gradients: "grads", reducing: "reduces", reduced: "reduced", updated: "updated" };
  const SAVED = { here: "here", leaving: "leaves", away: "away", coming: "returns" };

  // A column for each layer and a row for each rank. Each box is a whole layer, as wide as its
  // bytes; at rest only the part of this rank's shard is filled. The bar below it is the gradient.
  //
  // If activations leave, they are below that, as wide as their bytes: striped while they move, empty
  // while they are away.
  //
  // `tight` leaves out the arrows between ranks and the classes of the layers.
  function drawLayers(player, { width, tight }) {
    const { tape, frame } = player, ranks = tape.world_size, narrow = width < 520;
    const side = narrow ? 42 : 50, column = (width - side) / tape.layers.length;
    const head = tight || narrow ? 34 : 50, below = tape.leave ? 11 : 0;
    const pitch = (tight ? 30 : 54) + below;
    const most = Math.max(...tape.layers.map(layer => layer.bytes));
    const end = head + pitch * (ranks - 1) + 28 + below, height = end + (tape.leave ? 16 : 0);
    const parts = [...Array(ranks).keys()].map(r => s("text", { x: 0, y: head + r * pitch + 13,
      class: "muted" }, `rank ${r}`));
    if (narrow) parts.push(s("text", { x: 0, y: 12 }, "layer"));
    if (tape.leave) parts.push(s("text", { x: 0, y: end + 11, class: "muted" }, "saved"));
    tape.layers.forEach((layer, l) => {
      const x = side + l * column, state = frame.layers[l], [name, kind] = layer.label.split(" (");
      const box = (column - 10) * layer.bytes / most, saved = frame.saved[l];
      parts.push(
        s("text", { x, y: 12 }, narrow ? name.replace("layer ", "") : name),
        narrow || tight ? [] : s("text", { x, y: 27, class: "muted" }, kind.slice(0, -1)),
        s("text", { x, y: head - 6, class: state.state === "computing" ? "strong" : "muted" },
          WORDS[state.state]),
        saved ? s("text", { x, y: end + 11, class: "muted" }, SAVED[saved.state]) : [],
        [...Array(ranks).keys()].map(r => s("g", { role: "img", "data-state": state.state,
          "aria-label": `rank ${r}, ${layer.label}: ${state.state}` +
            (saved ? `, activations ${saved.state}` : "") },
        [drawCell(x, head + r * pitch, box, state, r, ranks),
          saved ? drawSaved(x, head + r * pitch + 30, (column - 10) * saved.of / Math.max(...tape.allSaved),
            saved) : []])));
    });
    if (!tight) parts.push(frame.flight.map(message => {
      const x = side + message.layer * column + (column - 10) / 2;
      return [...Array(ranks - 1).keys()].map(r =>
        drawArrows(x, head + r * pitch + 29 + below, pitch - 32 - below, message.what === "fetch" ? "flight" :
          "reduce"));
    }));
    return s("svg", { class: "tape-layers", viewBox: `0 0 ${width} ${height}`, width, height,
      role: "group", "aria-label": "State of each layer on each rank" }, parts);
  }

  // One layer on one rank: its parameters above, its gradient below.
  function drawCell(x, y, width, { params, busy, grads }, rank, ranks) {
    const part = width / ranks, own = x + rank * part;
    const rect = (x, y, width, height, name) => s("rect", { x, y, width: Math.max(0, width), height,
      rx: 1.5, style: `${paint(name)};stroke:${color(name)};stroke-width:1.2` });
    const outline = s("rect", { x, y, width, height: 16, rx: 1.5, class: "tape-empty" });
    const full = { filling: "grad", full: "grad", reducing: "reduce" }[grads];
    // While the layer arrives, the rank's own shard is there already.
    const others = params !== "unsharding" ? [] :
      [[x, own - x], [own + part, x + width - own - part]].filter(([, wide]) => wide > 1);
    return [outline,
      params === "whole" ? rect(x, y, width, 16, busy ? "compute" : "whole") :
        rect(own, y, part, 16, "shard"),
      others.map(([from, wide]) => rect(from, y, wide, 16, "flight")),
      full ? rect(x, y + 19, width, 7, full) : [],
      ["reduced", "shard"].includes(grads) ? rect(own, y + 19, part, 7, "reduced") : []];
  }

  // What autograd has saved in a layer, on one rank.
  function drawSaved(x, y, width, { state }) {
    const name = { here: "file", leaving: "moving", coming: "moving" }[state];
    return s("rect", { x, y, width, height: 7, rx: 1.5, "data-saved": state, ...name ?
      { style: `${paint(name)};stroke:${color(name)};stroke-width:1.2` } : { class: "tape-empty" } });
  }

  // Two arrows between the boxes of neighbouring ranks, down and up.
  function drawArrows(x, y, length, name) {
    const arrow = (x, from, to) => {
      const back = from < to ? to - 6 : to + 6;
      return [s("path", { class: "tape-arrow", d: `M${x},${from}V${back}`,
        style: `stroke:${color(name)}` }),
      s("path", { d: `M${x - 4},${back}L${x},${to}L${x + 4},${back}Z`,
        style: `fill:${color(name)}` })];
    };
    return [arrow(x - 6, y, y + length), arrow(x + 6, y + length, y)];
  }

  // What the colours mean. Returns the list, and a function that writes the bytes of each.
  function drawLegend(withBytes) {
    const swatch = name => s("svg", { width: 12, height: 12, "aria-hidden": true },
      s("rect", { x: .5, y: .5, width: 11, height: 11, rx: 2,
        style: `${paint(name)};stroke:${color(name)}` }));
    const items = Object.entries(HELD).map(([kind, [name, label]]) => {
      const value = el("b");
      return [kind, value, el("li", {}, [swatch(name), label, withBytes ? value : []])];
    });
    // A layer that computes is whole, so it has no bytes of its own.
    const computes = el("li", {}, [swatch("compute"), "computes"]);
    // Activations are not among the bytes above.
    const value = el("b"), saved = el("li", { hidden: "" }, [swatch("file"),
      "activations in memory", value]);
    const list = el("ul", { class: "tape-legend" }, [items.map(([, , item]) => item), computes,
      saved]);
    return [list, player => {
      saved.hidden = !player.tape.leave;
      value.textContent = number(player.tape.saved[player.index]);
      for (const [kind, value, item] of items) {
        value.textContent = number(player.frame.held[kind]);
        item.toggleAttribute("data-none", !player.frame.held[kind]);
      }
    }];
  }

  // ---------------------------------------------------------------------------------- controls

  // Buttons and a slider. Returns the parts, and a function that shows the player's position.
  function controls(player) {
    const play = button("Play", () => player.toggle(), { class: "tape-play" });
    const slider = el("input", { type: "range", min: 0, step: 1, "aria-label": "event of the step",
      oninput: () => player.jump(+slider.value) });
    const count = el("span", { class: "tape-count" });
    const parts = { play, slider, count,
      back: button("◀", () => player.step(-1), { "aria-label": "previous event" }),
      next: button("▶", () => player.step(1), { "aria-label": "next event" }) };
    return [parts, () => {
      play.textContent = player.playing ? "Pause" : "Play";
      slider.max = player.count;
      slider.value = player.index;
      slider.setAttribute("aria-valuetext",
        `event ${player.index} of ${player.count}: ${player.says}`);
      count.textContent = `${player.index} / ${player.count}`;
    }];
  }

  const origin = tape => `Recorded on ${tape.world_size} rank${tape.world_size > 1 ? "s" : ""}, ` +
    `${tape.device}, torch ${tape.torch}, commit ${tape.commit}.`;

  // A sentence. While the tape plays, a screen reader could not keep up, so it is not announced.
  function sentence() {
    const node = el("p", { class: "tape-says", "aria-live": "polite" });
    return [node, (player, words) => {
      node.setAttribute("aria-live", player.playing ? "off" : "polite");
      node.replaceChildren(el("b", {}, `${capital(player.phase)}: `), words);
    }];
  }

  // Draws pictures in `nodes` as wide as they are, again when a width or the recording changes.
  // `pictures` maps a class of a node to a function of its width; each returns a picture and
  // possibly a function that moves it. Returns a function that shows the player's position.
  function pictures(player, root, draws) {
    const nodes = Object.keys(draws).map(name => root.querySelector(name));
    let moves = [], drawn = "";
    const show = () => {
      const now = [player.tape.key, ...nodes.map(node => node.clientWidth)].join();
      if (now !== drawn) {
        moves = nodes.map((node, i) => {
          const [picture, move] = Object.values(draws)[i](Math.max(120, node.clientWidth));
          node.replaceChildren(picture);
          return move;
        });
        drawn = now;
      }
      moves.forEach(move => move(player.index));
    };
    const observer = new ResizeObserver(show);
    nodes.forEach(node => observer.observe(node));
    return show;
  }

  // The layers have no cursor: they are drawn anew at each position.
  function layersIn(player, options) {
    return width => {
      const group = el("div");
      return [group, () => group.replaceChildren(drawLayers(player, { width, ...options }))];
    };
  }

  return { el, s, sum, button, bytes, capital, pageOf, still, addPatterns, load, Player, playOnce,
    sceneAt, origin, drawMemory, drawLayers, drawLegend, controls, sentence, pictures, layersIn };
})();
