// The tape: one recorded training step, to move through event by event.
//
// `tape.py` records the step and calculates the state after each event. This script draws it. It
// needs only `const TAPE = {...}` and `<div id="tape"></div>`. Position 0 is the state before the
// first event, and position i the state after the i-th. `#e=57` in the address opens position 57.
(() => {
  "use strict";
  const root = document.getElementById("tape");
  const ranks = TAPE.ranks, layers = TAPE.layers, events = ranks[0].events, count = events.length;
  const others = ranks.length - 1;
  // The kinds of memory, in the order of `HELD` in `tape.py`: colour and name of each.
  const HELD = {
    rest: ["--c-shard", "at rest"],
    reduced: ["--c-reduced", "shards' gradients"],
    whole: ["--c-whole", "whole"],
    unsharding: ["--c-flight", "all-gather in flight"],
    gradients: ["--c-grad", "full gradients"],
    receive_buffer: ["--c-reduce", "receive buffer of a reduce"],
  };
  const HATCHED = { "--c-flight": 1, "--c-reduce": 1 };
  let index = 0, shown = 0, call = 0, timer = null, saving = null;

  // ---------------------------------------------------------------------------------- elements

  const bytes = n => n.toLocaleString("en-US") + " bytes";
  const color = name => `var(${name})`;
  const SVG = "http://www.w3.org/2000/svg";

  function fill(node, attributes, children) {
    for (const [key, value] of Object.entries(attributes || {})) {
      if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
      else if (value !== null) node.setAttribute(key, value);
    }
    node.append(...[children === undefined ? [] : children].flat(3));
    return node;
  }
  const el = (tag, attributes, children) => fill(document.createElement(tag), attributes, children);
  const s = (tag, attributes, children) =>
    fill(document.createElementNS(SVG, tag), attributes, children);
  const text = (x, y, words, more) => s("text", { x, y, ...more }, words);
  const paint = name => HATCHED[name] ? `url(#hatch${name})` : color(name);
  const rect = (x, y, width, height, style) => s("rect", { x, y, width, height, style });

  // Stripes mean "in flight", so that it is visible without colours, too.
  const hidden = { width: 0, height: 0, style: "position:absolute", "aria-hidden": true };
  const patterns = () => s("svg", hidden, s("defs", {}, Object.keys(HATCHED).map(name =>
      s("pattern", { id: "hatch" + name, width: 6, height: 6, patternUnits: "userSpaceOnUse",
        patternTransform: "rotate(45)" }, [
        rect(0, 0, 6, 6, `fill:${color(name)};fill-opacity:.25`),
        rect(0, 0, 2.5, 6, `fill:${color(name)}`)]))));

  // ------------------------------------------------------------------------------------ memory

  // One picture for each rank: its memory, stacked by kind, and the three levels. Returns a function
  // that moves the cursor.
  function drawMemory(rank, node, first) {
    const width = node.clientWidth, top = first ? 20 : 4, height = top + 126, bottom = height - 2;
    const across = width / (count + 1), peak = TAPE.data_parallel.peak_bytes;
    const x = i => +(i * across).toFixed(2);
    const y = n => +(bottom - n / (1.05 * peak) * (bottom - top)).toFixed(2);
    const parts = [], floor = rank.frames.map(() => 0);
    for (const [kind, [name]] of Object.entries(HELD)) {
      // Draw the upper edge to the right, and the lower one back.
      let up = "", down = "";
      rank.frames.forEach((frame, i) => {
        const low = floor[i], high = low + frame.held[kind];
        floor[i] = high;
        up += `${i ? "L" : "M"}${x(i)},${y(high)}H${x(i + 1)}`;
        down = `L${x(i + 1)},${y(low)}H${x(i)}` + down;
      });
      parts.push(s("path", { d: up + down + "Z", style: `fill:${paint(name)}` +
        (kind === "rest" ? ";fill-opacity:.4" : "") }));
    }
    // Later events are pale.
    const veil = rect(0, top, width, bottom - top, "fill:var(--bg);fill-opacity:.62");
    const line = (n, label, name, under) => [
      s("path", { class: "level", d: `M0,${y(n)}H${width}`, style: `stroke:${color(name)}` }),
      text(4, y(n) + (under ? 14 : -4), label + bytes(n), { "font-size": 11.5 })];
    const edge = "M0," + y(floor[0]) + floor.map((n, i) => `V${y(n)}H${x(i + 1)}`).join("");
    const phases = events.map((e, i) => [e.phase, i + 1])
      .filter(([phase], i) => !i || phase !== events[i - 1].phase)
      .map(([phase, i]) => [
        s("path", { d: `M${x(i)},${first ? 4 : top}V${bottom}`, style: "stroke:var(--line)" }),
        first ? text(Math.min(x(i) + 4, width - 27), 14, phase) : []]);
    const cursor = s("g", {}, [
      s("path", { d: `M0,${top}V${bottom}`, style: "stroke:var(--fg);stroke-width:2" }),
      s("circle", { r: 4, style: "fill:var(--fg);stroke:var(--bg);stroke-width:1.5" })]);
    const about = `Live bytes of rank ${rank.rank} over the ${count} events of one step, and ` +
      "the predictions at rest, at the peak, and for data parallel training.";
    const at = event => go(Math.floor((event.clientX - node.getBoundingClientRect().left) / across));
    node.replaceChildren(s("svg", {
      class: "memory", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": about,
      onpointerdown: event => {
        event.currentTarget.setPointerCapture(event.pointerId); play(false); at(event); },
      onpointermove: event => event.buttons && at(event),
    }, [parts, veil, phases,
      s("path", { d: edge, style: "fill:none;stroke:var(--fg);stroke-width:1.2" }),
      line(peak, "plain data parallel training, peak: ", "--muted", true),
      line(rank.predicted.peak_bytes, "predicted peak: ", "--c-grad", false),
      line(rank.predicted.rest_bytes, "predicted at rest: ", "--c-shard", true), cursor]));
    return i => {
      veil.setAttribute("x", x(i + 1));
      veil.setAttribute("width", Math.max(0, width - x(i + 1)));
      cursor.firstChild.setAttribute("transform", `translate(${x(i + 0.5)})`);
      cursor.lastChild.setAttribute("transform", `translate(${x(i + 0.5)},${y(floor[i])})`);
    };
  }

  // -------------------------------------------------------------------------------------- grid

  // A row for each layer, a cell for each rank, and arrows for communication between them. Filled
  // boxes are in memory. The shard is on the left and the buffer for all shards on the right, with
  // parameters above and gradients below. Lengths are proportional to bytes.
  function drawGrid(node) {
    const width = node.clientWidth, narrow = width < 500, head = 34;
    const side = narrow ? 0 : 84, row = narrow ? 68 : 54, lift = narrow ? 15 : 0;
    const gutter = narrow ? 88 : 100, cell = (width - side - others * gutter) / ranks.length;
    const unit = (cell - 6) / (ranks.length + 1), height = head + row * layers.length;
    const left = r => side + r * (cell + gutter), full = r => left(r) + unit + 6;
    const most = Math.max(...layers.map(layer => layer.bytes));
    const parts = ranks.map((rank, r) => [
      text(left(r), 12, `rank ${rank.rank}`, { "font-weight": 600 }),
      text(left(r), 28, "shard", { class: "muted" }),
      text(full(r), 28, unit < 36 ? "" : narrow ? "full" : "full buffer", { class: "muted" })]);
    layers.forEach((layer, l) => {
      const y = head + l * row, scale = layer.bytes / most;
      const [, name, kind] = /^(.*?)( \(.*\))?$/.exec(layer.label);
      parts.push(s("path", { d: `M0,${y}H${width}`, style: "stroke:var(--line)" }),
        text(0, y + (narrow ? 14 : 18), narrow ? layer.label : name),
        text(0, y + 33, narrow || !kind ? "" : kind.slice(2, -1), { class: "muted" }));
      ranks.forEach((rank, r) => {
        const { params, busy, grads, state } = rank.frames[index].layers[l];
        const top = y + 7 + lift, whole = scale * unit * ranks.length, mine = scale * unit;
        const computes = busy && params === "whole";
        const box = (x, w, dy, h, name) => rect(x, top + dy, w, h,
          name ? `fill:${paint(name)}` : "fill:none;stroke:var(--line);stroke-dasharray:3 3");
        const held = computes ? "--c-compute" : params !== "shard" && HELD[params][0];
        const about = `rank ${rank.rank}, ${layer.label}: ${state}`;
        parts.push(s("g", { role: "img", "aria-label": about, "data-state": state }, [
          box(left(r), mine, 0, 12, "--c-shard"), box(full(r), whole, 0, 12, held),
          ["reduced", "shard"].includes(grads) ? box(left(r), mine, 14, 6, "--c-reduced") : [],
          !["none", "shard"].includes(grads) ? box(full(r), whole, 14, 6, "--c-grad") : [],
          text(left(r), top + 33, state, { class: state === "shard" ? "muted" : null,
            "font-weight": computes ? 600 : 400 })]));
      });
    });
    // All ranks send the same in both directions, so one label in each gap is enough.
    for (const { layer, what, bytes: sent } of ranks[shown].frames[index].flight) {
      const y = head + layer * row + 7 + lift, name = what === "fetch" ? "--c-flight" : "--c-reduce";
      for (let gap = 0; gap < others; gap++) {
        const a = left(gap) + cell + 5, b = left(gap + 1) - 5, stroke = `stroke:${color(name)}`;
        const arrow = (from, to, dy) => {
          const back = from < to ? to - 6 : to + 6;
          return [s("path", { class: "arrow", d: `M${from},${y + dy}H${to}`, style: stroke }),
            s("path", { d: `M${back},${y + dy - 4}L${to},${y + dy}L${back},${y + dy + 4}Z`,
              style: `fill:${color(name)}` })];
        };
        const under = (dy, words) => text((a + b) / 2, y + dy, words, { "text-anchor": "middle",
          "font-size": 11.5 });
        parts.push(arrow(a, b, 3), arrow(b, a, 13), under(29, bytes(sent / others)),
          under(42, what === "fetch" ? "of shards" : "of gradients"));
      }
    }
    node.replaceChildren(s("svg", { viewBox: `0 0 ${width} ${height}`, role: "group",
      "aria-label": "State of each layer on each rank" }, parts));
  }

  // -------------------------------------------------------------------------------------- code

  // The function that is running, scrolled to its line, and buttons for the calls that led there.
  function drawCode() {
    const lines = index ? ranks[shown].events[index - 1].lines : [];
    call = Math.min(call, Math.max(0, lines.length - 1));
    ui.calls.replaceChildren(...lines.map(([file, line, name], i) => el("li", {},
      button(`${file}:${line} ${name}`, () => { call = i; drawCode(); }, { "aria-pressed": i === call }))));
    ui.code.textContent = "  Press Play, drag along a curve, or use the arrow keys.";
    if (!index) return;
    const [file, at, name] = lines[call], code = TAPE.functions[`${file}:${name}`];
    const rows = code.text.split("\n"), page = file.replace(/\.py$/, ".html");
    const indent = Math.min(...rows.filter(row => row.trim()).map(row => row.search(/\S/)));
    let quoted = false;
    ui.code.replaceChildren(...rows.map((row, i) => {
      const number = code.first + i, marks = row.split('"""').length - 1;
      const quiet = quoted || marks > 0;
      quoted = quoted !== (marks % 2 === 1);
      const [, before, comment] = /^([^#]*)(#.*)?$/.exec(row.slice(indent));
      const now = number === at || null;
      return el("div", { class: now && "now", "aria-current": now }, [
        // Only lines of code have a place on the source's page.
        el("a", before.trim() && !quiet ? { href: `${page}#L${number}` } : {}, String(number)),
        el("span", { class: quiet ? "quiet" : null }, before),
        el("span", { class: "quiet" }, comment || "")]);
    }));
    // Scroll the box and not the page.
    const now = ui.code.querySelector(".now");
    ui.code.scrollTop = now.offsetTop - ui.code.clientHeight * 0.45;
  }

  // ---------------------------------------------------------------------------------- position

  function go(i, written = false) {
    const before = index;
    index = Math.max(0, Math.min(count, Math.round(i)));
    if (index !== before) call = 0;
    const e = index > 0 && ranks[shown].events[index - 1];
    const says = e ? `${e.text}.` : `each rank holds its shards and the optimizer's moments.`;
    ui.says.replaceChildren(el("b", {}, `rank ${shown}, ${e ? e.phase : "between two steps"}: `), says);
    ui.slider.value = index;
    ui.slider.setAttribute("aria-valuetext", `event ${index} of ${count}: ${says}`);
    ui.count.textContent = `${index} / ${count}`;
    ui.phases.forEach(b => b.setAttribute("aria-pressed", e && b.textContent === e.phase));
    ui.ranks.forEach((b, r) => b.setAttribute("aria-pressed", r === shown));
    ranks.forEach((rank, r) => {
      const live = Object.values(rank.frames[index].held).reduce((a, b) => a + b);
      const peak = live === rank.predicted.peak_bytes ? ", the predicted peak" :
        live === rank.predicted.rest_bytes ? ", as predicted at rest" : "";
      ui.live[r].textContent = bytes(live) + " live" + peak;
    });
    for (const [kind, item] of Object.entries(ui.held)) {
      const n = ranks[shown].frames[index].held[kind];
      item.lastChild.textContent = n.toLocaleString("en-US");
      item.toggleAttribute("data-none", !n);
    }
    ui.move.forEach(move => move(index));
    drawGrid(ui.grid);
    drawCode();
    // Browsers limit the number of updates, so wait until the slider rests. Do not write back an
    // address that has just been read.
    clearTimeout(saving);
    if (!written) saving = setTimeout(() => history.replaceState(null, "", `#e=${index}`), 150);
  }

  function play(on) {
    clearInterval(timer);
    timer = on ? setInterval(() => index < count ? go(index + 1) : play(false), 650) : null;
    if (on && index === count) go(0);
    ui.play.textContent = on ? "Pause" : "Play";
    ui.grid.classList.toggle("playing", on);
    // While the tape plays, a screen reader could not keep up.
    ui.says.setAttribute("aria-live", on ? "off" : "polite");
  }

  const step = by => { play(false); go(index + by); };
  const button = (label, onclick, more) => el("button", { type: "button", onclick, ...more }, label);
  const fromHash = () => (/(?:^#|&)e=(\d+)/.exec(location.hash) || [])[1];
  const names = [...new Set(events.map(e => e.phase))];
  const ui = {
    play: button("Play", () => play(!timer), { class: "tape-play" }),
    slider: el("input", { type: "range", min: 0, max: count, step: 1, value: 0,
      "aria-label": "event", oninput: event => { play(false); go(+event.target.value); } }),
    count: el("span", { class: "tape-count" }),
    phases: names.map(phase => button(phase, () => {
      play(false); go(events.findIndex(e => e.phase === phase) + 1);
    })),
    ranks: ranks.map((rank, r) => button(`rank ${rank.rank}`, () => { shown = r; go(index); })),
    says: el("p", { class: "tape-says", "aria-live": "polite" }),
    live: ranks.map(() => el("span")), memory: ranks.map(() => el("div")), move: [],
    held: Object.fromEntries(Object.entries(HELD).map(([kind, [name, label]]) => [kind, el("li", {}, [
      el("i", { style: HATCHED[name] ? `background:repeating-linear-gradient(45deg,${color(name)} 0 ` +
        "2px,transparent 2px 4px)" : `background:${color(name)}` }), label, el("b")])])),
    grid: el("div"), calls: el("ol", { class: "tape-calls" }),
    code: el("pre", { tabindex: 0, "aria-label": "source of the function that runs" }),
  };
  root.replaceChildren(patterns(),
    el("div", { class: "tape-controls" }, [
      el("div", { class: "tape-bar" }, [button("◀", () => step(-1), { "aria-label": "previous event" }),
        ui.play, button("▶", () => step(1), { "aria-label": "next event" }), ui.count, ui.phases,
        ui.slider]), ui.says]),
    el("div", { class: "tape-body" }, [
      el("div", {}, [
        ranks.map((rank, r) => [el("h3", {}, [`rank ${rank.rank}`, ui.live[r]]), ui.memory[r]]),
        el("ul", { class: "tape-held" }, Object.values(ui.held)), el("h3", {}, "layers"), ui.grid,
        el("p", { class: "tape-note" }, "Filled boxes are in memory, parameters above and gradients " +
          "below; their lengths are bytes. Stripes are in flight. Shards and moments are at rest. " +
          `Recorded with ${ranks.length} ranks, ${TAPE.device}, torch ${TAPE.torch}, commit ` +
          `${TAPE.commit}.`)]),
      el("div", { class: "tape-code" }, [
        el("div", { class: "tape-bar" }, ["Source line of", ui.ranks]), ui.calls, ui.code])]));

  // Text keeps its size. The pictures use the available width, and are redrawn when it changes.
  let width;
  const draw = () => {
    width = ui.grid.clientWidth;
    ui.move = ranks.map((rank, r) => drawMemory(rank, ui.memory[r], r === 0));
    go(index, true);
  };
  new ResizeObserver(() => {
    if (width !== ui.grid.clientWidth) draw();
  }).observe(ui.grid);
  addEventListener("hashchange", () => fromHash() && go(+fromHash(), true));
  addEventListener("keydown", event => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    const other = event.altKey || event.ctrlKey || event.metaKey || event.shiftKey;
    if (!by || other || event.target.closest("input, select, textarea, pre")) return;
    event.preventDefault();
    step(by);
  });
  index = Math.min(count, +(fromHash() || 0));
  draw();
  window.tape = { go, get index() { return index; }, count };
})();
