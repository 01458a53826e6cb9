// The calculator: memory and traffic of one rank, for any model.
//
// The formulas are those of `formulas.py` and `saved.py` in `zero3/estimate`, and a test compares them. The script needs
// only `<div id="calculator">`. Inputs are kept in the address: `#model=8b&layers=32&ranks=64`.
(() => {
  "use strict";
  const root = document.getElementById("calculator");

  // ---------------------------------------------------------------------------------- formulas

  // Bytes of a parameter, its gradient, and its optimizer states.
  const WIDTHS = { fp32: [4, 4, 8], 16: [2, 2, 12], 18: [2, 4, 12], 20: [2, 2, 16] };
  const NAMES = ["data parallel", "ZeRO-1", "ZeRO-2", "ZeRO-3", "ZeRO-3 with offload"];
  const none = () => ({ parameters: 0, gradients: 0, states: 0, working: 0, activations: 0 });

  // ZeRO's Table 1 in parts, and the working buffers of each stage.
  function stageParts({ params, ranks, layers, precision }, stage) {
    const [p, g, k] = WIDTHS[precision], layer = params / layers;
    return {
      parameters: params * p / (stage > 2 ? ranks : 1),
      gradients: params * g / (stage > 1 ? ranks : 1),
      states: params * k / (stage > 0 ? ranks : 1),
      working: [0, 0, p * layer, 3 * p * layer][stage],
    };
  }

  // In fp32 there is no master. Parameters on the device need a copy in the tier in which the
  // optimizer steps them, and parameters in files are read and written along with their states.
  function widths({ precision, params_in, states_in }) {
    const [p, g, k] = WIDTHS[precision], fp32 = p === 4;
    const copy = fp32 && params_in === "device" && states_in !== "device" ? p : 0;
    const along = fp32 && params_in === "nvme" ? p : 0;
    return { p, g, k: k + copy, stepped: g + k + copy + along };
  }

  function offloadParts(q) {
    const { p, g, k, stepped } = widths(q), shard = q.params / q.ranks, layer = q.params / q.layers;
    const parts = { device: none(), cpu: none(), nvme: none() };
    parts.device.working = 3 * p * layer;
    parts[q.params_in].parameters = p * shard;
    parts[q.states_in].gradients = g * shard;
    parts[q.states_in].states = k * shard;
    // Files need buffers in CPU memory: two for shards, five for states.
    if (q.params_in === "nvme") parts.cpu.working += 2 * p * layer / q.ranks;
    if (q.states_in === "nvme") parts.cpu.working += 5 * stepped * layer / q.ranks;
    return parts;
  }

  function offloadMoves(q) {
    const { p, stepped } = widths(q), shard = q.params / q.ranks, moved = { cpu: 0, nvme: 0 };
    // Gradients go to the CPU. Parameters come back, unless they rest there.
    if (q.states_in === "cpu") moved.cpu += (q.params_in === "device" ? 2 : 1) * p * shard;
    // Forward and backward read parameters.
    if (q.params_in !== "device") moved[q.params_in] += 2 * p * shard;
    // Master, moments and gradient are each written and read.
    if (q.states_in === "nvme") moved.nvme += 2 * stepped * shard;
    // The master is rounded into the parameters, which are written too.
    if (q.params_in === "nvme" && p < 4) moved.nvme += p * shard;
    return moved;
  }

  // What autograd saves in blocks of GPT-2 and in the head. If it leaves, all blocks do, all but
  // the last come back, and at most two calls are in memory.
  function activations({ params, layers, precision, sequence, batch }, leaves) {
    const width = Math.max(1, Math.floor(Math.sqrt(params / (12 * layers))));
    const token = WIDTHS[precision][0] * batch * sequence;
    const block = token * (28 * width + Math.ceil(width / 64) * sequence), head = 2 * token * width;
    if (!leaves) return { memory: layers * block + head, out: 0, moved: 0 };
    return { memory: block + (layers > 1 ? block : head), out: layers * block,
      moved: (2 * layers - 1) * block };
  }

  // A row for each of `NAMES`: bytes in each tier by kind, and the traffic of a step.
  // `q` has params, ranks, layers, precision, params_in, states_in, sequence, batch and
  // activations_in.
  function compute(q) {
    return NAMES.map((name, stage) => {
      const offload = stage === 4;
      const elements = (stage > 2 ? 3 : 2) * q.params * (q.ranks - 1) / q.ranks;
      const parts = offload ? offloadParts(q)
        : { device: stageParts(q, stage), cpu: none(), nvme: none() };
      const moved = offload ? offloadMoves(q) : { cpu: 0, nvme: 0 };
      const tier = offload ? q.activations_in : "device";
      const saved = activations(q, tier !== "device");
      parts.device.activations = saved.memory;
      if (tier !== "device") {
        parts[tier].activations = saved.out;
        moved[tier] += saved.moved;
      }
      return { name, parts, moved, sent_elements: elements,
        sent_bytes: elements * WIDTHS[q.precision][0] };
    });
  }

  // ------------------------------------------------------------------------------------- input

  const MOST = 1e24;
  const PRESETS = [["125M", 12], ["1.3B", 24], ["8B", 32], ["70B", 80]];
  // Tiers of the parameters and of the optimizer states, the fastest first.
  const OFFLOADS = [["device-device", "nothing"], ["device-cpu", "states to CPU memory"],
    ["cpu-cpu", "parameters, states to CPU memory"], ["device-nvme", "states to files"],
    ["cpu-nvme", "parameters to CPU, states to files"],
    ["nvme-nvme", "parameters, states to files"]];
  const CHOICES = OFFLOADS.map(([pair]) => pair);
  const ACTIVATIONS = [["device", "stay"], ["cpu", "to CPU memory"], ["nvme", "to files"]];
  const DEFAULTS = { model: "8b", layers: "32", ranks: "64", precision: "16", offload: "device-device",
    gpu: "80GB", sequence: "2048", batch: "0", activations: "device" };
  const LABELS = { model: "Parameters", layers: "Layers", ranks: "Ranks", precision: "Precision, bytes per parameter",
    offload: "Offload", gpu: "Memory of a GPU", sequence: "Tokens in a sequence",
    batch: "Sequences of a rank", activations: "Activations" };
  const EXPECTED = {
    model: "a number of parameters from 1 up, such as 8b, 350m or 7.5e9",
    layers: "a whole number from 1 up, such as 32",
    ranks: "a whole number from 1 up, such as 64",
    precision: `one of ${Object.keys(WIDTHS).join(", ")}`,
    offload: `one of ${CHOICES.join(", ")}`,
    gpu: "a number of bytes, such as 80GB",
    sequence: "a whole number from 1 up, such as 2048",
    batch: "a whole number from 0 up, such as 4",
    activations: `one of ${ACTIVATIONS.map(([tier]) => tier).join(", ")}`,
  };

  // Read 7.5e9, 8b, 80GB or 1TB, in powers of 1000, as `number` in `formulas.py` does. NaN otherwise.
  function number(text) {
    text = text.trim().toLowerCase();
    if (["kb", "mb", "gb", "tb"].includes(text.slice(-2))) text = text.slice(0, -1);
    const power = text ? "kmgt".indexOf(text.slice(-1).replace("b", "g")) + 1 : 0;
    const digits = (power ? text.slice(0, -1) : text).trim();
    const good = /^[+-]?(\d+(_\d+)*\.?(\d+(_\d+)*)?|\.\d+(_\d+)*)(e[+-]?\d+)?$/.test(digits);
    const value = good ? Number(digits.replaceAll("_", "")) * 1000 ** power : NaN;
    return value >= 0 && value < Infinity ? value : NaN;
  }

  // Whole numbers may have commas: 8,000,000,000. With a unit, 7,125b could mean 7.125b too.
  const THOUSANDS = /^\s*[1-9]\d{0,2}(,\d{3})+\s*$/;
  const typedNumber = (text) => number(THOUSANDS.test(text) ? text.replaceAll(",", "") : text);

  // How to write a number that is refused because of its form.
  function hint(text) {
    if (/[kmgt]ib\s*$/i.test(text)) return " Units are powers of 1000: GB is read, GiB is not.";
    if (text.includes(",")) {
      return " Write 7.5b, not 7,5b: commas only group digits of whole numbers, as in 8,000,000,000.";
    }
    return "";
  }

  const GOOD = {
    model: (value) => value >= 1 && value <= MOST,
    layers: (value) => Number.isInteger(value) && value >= 1 && value <= MOST,
    ranks: (value) => Number.isInteger(value) && value >= 1 && value <= MOST,
    gpu: (value) => value <= MOST,
    sequence: (value) => Number.isInteger(value) && value >= 1 && value <= MOST,
    batch: (value) => Number.isInteger(value) && value <= MOST,
    precision: (text) => text in WIDTHS,
    offload: (text) => CHOICES.includes(text),
    activations: (text) => ACTIVATIONS.some(([tier]) => tier === text),
  };
  const CHOSEN = ["precision", "offload", "activations"];

  // The question that the fields ask, and a message for each field that cannot be read.
  function read(texts) {
    const values = {}, problems = {};
    for (const [name, good] of Object.entries(GOOD)) {
      values[name] = CHOSEN.includes(name) ? texts[name] : typedNumber(texts[name]);
      if (!good(values[name])) {
        const got = texts[name].trim() || "nothing";
        problems[name] = `${LABELS[name]}: expected ${EXPECTED[name]}. Got: ${got}.` +
          hint(texts[name]);
      }
    }
    const [params_in, states_in] = values.offload.split("-");
    return { problems, gpu: values.gpu, q: { params: values.model, ranks: values.ranks,
      layers: values.layers, precision: values.precision, params_in, states_in,
      sequence: values.sequence, batch: values.batch, activations_in: values.activations } };
  }

  // ------------------------------------------------------------------------------------ output

  function el(tag, attributes, ...children) {
    const node = document.createElement(tag);
    for (const [key, value] of Object.entries(attributes || {})) {
      if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
      else if (value !== null) node.setAttribute(key, value);
    }
    node.append(...children.flat(3));
    return node;
  }

  // Three digits, with a unit in powers of 1000.
  function short(value, units) {
    let i = 0;
    while (value >= 999.5 && i < units.length - 1) {
      value /= 1000;
      i++;
    }
    const digits = value >= 999.5 ? value.toExponential(2) : String(+value.toPrecision(3));
    return units[i] ? `${digits} ${units[i]}` : digits;
  }
  const bytes = (value) => short(value, ["bytes", "kB", "MB", "GB", "TB", "PB", "EB"]);
  const count = (value) => short(value, ["", "thousand", "million", "billion", "trillion"]);
  const sum = (kinds) => Object.values(kinds).reduce((a, b) => a + b);

  const TIERS = { device: "device", cpu: "CPU", nvme: "files" };
  // The colour of a kind says whether it is whole or in shards.
  const MEANING = [["whole", "whole parameters"], ["shard", "shards of parameters"],
    ["grad", "whole gradients"], ["reduced", "shards of gradients"], ["state", "optimizer states"],
    ["working", "working buffers"], ["saved", "activations"]];
  const KINDS = {
    parameters: ["parameters", (stage) => stage > 2 ? "shard" : "whole"],
    gradients: ["gradients", (stage) => stage > 1 ? "reduced" : "grad"],
    states: ["states", () => "state"],
    working: ["working buffers", () => "working"],
    activations: ["activations", () => "saved"],
  };
  const swatch = (meaning) => el("i", { class: `calc-swatch calc-${meaning}`, "aria-hidden": true });

  // A bar as long as its bytes, with its values below it.
  function bar(stage, tier, kinds, scale, gpu) {
    const parts = Object.entries(kinds).filter(([, value]) => value);
    const boxes = parts.map(([kind, value]) => el("i", {
      class: `calc-${KINDS[kind][1](stage)}`, style: `width:${100 * value / scale}%` }));
    const line = tier === "device" && gpu <= scale
      ? el("b", { class: "calc-limit", style: `left:${100 * gpu / scale}%` }) : [];
    const values = parts.map(([kind, value]) => el("span", {},
      swatch(KINDS[kind][1](stage)), `${KINDS[kind][0]} ${bytes(value)}`));
    return el("div", { class: "calc-bar", "data-tier": tier },
      el("span", { class: "calc-tier" }, TIERS[tier]),
      el("div", { class: "calc-track", "aria-hidden": true }, boxes, line),
      el("span", { class: "calc-sum" }, bytes(sum(kinds))),
      el("p", { class: "calc-values" }, parts.length ? values : "nothing"));
  }

  function bars(rows, gpu) {
    const scale = Math.max(...rows.flatMap((row) => Object.values(row.parts).map(sum)));
    return rows.map((row, stage) => {
      const fits = sum(row.parts.device) <= gpu;
      return el("section", { class: "calc-row" },
        el("h2", {}, row.name, el("small", { class: fits ? null : "calc-over" },
          fits ? `fits ${bytes(gpu)}` : `does not fit ${bytes(gpu)}`)),
        Object.entries(row.parts).filter(([tier, kinds]) => tier === "device" || sum(kinds))
          .map(([tier, kinds]) => bar(stage, tier, kinds, scale, gpu)));
    });
  }

  function legend(rows, gpu) {
    const scale = Math.max(...rows.flatMap((row) => Object.values(row.parts).map(sum)));
    return el("ul", { class: "calc-legend" },
      MEANING.map(([meaning, name]) => el("li", {}, swatch(meaning), name)),
      gpu <= scale ? el("li", {}, el("i", { class: "calc-swatch calc-limit", "aria-hidden": true }),
        `a GPU of ${bytes(gpu)}`) : []);
  }

  function traffic(rows) {
    const cell = (value, write) => el("td", { class: "number" }, value ? write(value) : "0");
    return el("table", { class: "calc-traffic" },
      el("caption", {}, "Traffic of one rank in a step"),
      el("tr", {}, el("th"), ["elements sent", "bytes sent", "to and from CPU memory",
        "to and from files"].map((name) => el("th", { class: "number" }, name))),
      rows.map((row) => el("tr", {}, el("th", { scope: "row" }, row.name),
        cell(row.sent_elements, count), cell(row.sent_bytes, bytes),
        cell(row.moved.cpu, bytes), cell(row.moved.nvme, bytes))));
  }

  const listed = (texts) => [texts.slice(0, -1).join(", "), texts[texts.length - 1]].join(" and ");

  // The answer in words.
  function sentence(q, rows, gpu) {
    const row = rows[rows.length - 1], device = sum(row.parts.device);
    const { cpu, nvme } = row.parts, elsewhere = [];
    if (sum(cpu)) elsewhere.push(`${bytes(sum(cpu))} of CPU memory`);
    if (sum(nvme)) elsewhere.push(`${bytes(sum(nvme))} in files`);
    const ranks = q.ranks === 1 ? "On 1 rank" : `On ${q.ranks.toLocaleString("en-US")} ranks`;
    const also = elsewhere.length ? ` It also needs ${elsewhere.join(" and ")}.` : "";
    const { working, activations } = row.parts.device, states = device - working - activations;
    const named = [[states, "model states"], [working, "working buffers"],
      [activations, "activations"]].filter(([value]) => value);
    const parts = named.length === 1 ? `, all of it ${named[0][1]}`
      : `: ${listed(named.map(([value, name]) => `${bytes(value)} of ${name}`))}`;
    return `${ranks}, ${row.name} needs ${bytes(device)} on each device${parts}. That ` +
      `${device <= gpu ? "fits" : "does not fit"} a GPU with ${bytes(gpu)}` +
      `${activations ? "." : ", before activations."}${also} Plain data parallel training needs ${bytes(sum(rows[0].parts.device))}.`;
  }

  // -------------------------------------------------------------------------------------- page

  const fields = {}, notes = {};
  let saving = null, written = "";

  function field(name, control) {
    const id = `calc-${name}`;
    control.id = id;
    control.setAttribute("aria-describedby", `${id}-note`);
    // Some browsers report a choice from a list as a change only.
    for (const event of ["input", "change"]) control.addEventListener(event, () => update());
    fields[name] = control;
    notes[name] = el("p", { id: `${id}-note`, class: "calc-note", role: "status" });
    return el("div", { class: "calc-field" }, el("label", { for: id }, LABELS[name]), control);
  }
  const typed = (name) => field(name, el("input", { type: "text", autocomplete: "off",
    spellcheck: "false", autocapitalize: "off" }));
  const choice = (name, options) => field(name, el("select", {},
    options.map(([value, label]) => el("option", { value }, label))));

  const PRECISIONS = [["16", "half, 16 (ZeRO): 2 + 2 + 12"],
    ["18", "half, 18 (DeepSpeed): 2 + 4 + 12"],
    ["20", "half, 20 (ZeRO-Infinity): 2 + 2 + 16"], ["fp32", "fp32, 16: 4 + 4 + 8"]];
  const texts = () => Object.fromEntries(Object.entries(fields).map(([name, at]) =>
    [name, at.value]));

  function update(save = true) {
    const given = texts(), { problems, gpu, q } = read(given), bad = Object.keys(problems).length > 0;
    for (const [name, note] of Object.entries(notes)) {
      note.textContent = problems[name] || "";
      fields[name].setAttribute("aria-invalid", name in problems);
    }
    for (const preset of presets) {
      preset.setAttribute("aria-pressed", number(preset.textContent) === q.params);
    }
    for (const part of [ui.bars, ui.traffic]) part.classList.toggle("calc-stale", bad);
    if (bad) {
      ui.says.textContent = ui.bars.children.length
        ? "The bars show the last input that could be read." : "Correct the marked input first.";
      return;
    }
    const rows = compute(q);
    // Without offload the last row would repeat the one above it.
    if (q.states_in === "device" && (q.activations_in === "device" || !q.batch)) rows.pop();
    ui.says.textContent = sentence(q, rows, gpu);
    ui.bars.replaceChildren(legend(rows, gpu), ...bars(rows, gpu));
    ui.traffic.replaceChildren(traffic(rows));
    // Browsers limit the number of updates, so wait until typing rests. By then the fields may
    // have bad texts, so keep those that the bars show.
    clearTimeout(saving);
    if (save) saving = setTimeout(keep, 150, given);
  }

  function keep(given) {
    written = "#" + new URLSearchParams(given);
    history.replaceState(null, "", written);
  }

  // An address may be shortened by hand: inputs that it leaves out have their defaults. Addresses of
  // headings are not ours.
  function open() {
    const given = new URLSearchParams(location.hash.slice(1));
    const ours = Object.keys(DEFAULTS).some((name) => given.has(name));
    if (location.hash && !ours && fields.model.value) return;
    for (const [name, value] of Object.entries(DEFAULTS)) {
      const text = given.get(name) ?? value;
      const known = fields[name].tagName === "INPUT" || GOOD[name](text);
      fields[name].value = known ? text : value;
    }
    // Without this an earlier text would replace an address that cannot be read.
    clearTimeout(saving);
    update(false);
  }

  const presets = PRESETS.map(([model, layers]) => el("button", { type: "button", onclick: () => {
    fields.model.value = model;
    fields.layers.value = layers;
    update();
  } }, model));
  const ui = { says: el("p", { class: "calc-says", "aria-live": "polite" }),
    bars: el("div", { class: "calc-bars" }), traffic: el("div") };
  root.replaceChildren(
    el("form", { class: "calc-form", onsubmit: (event) => event.preventDefault() },
      el("div", { class: "calc-presets", role: "group", "aria-label": "Models" }, "Model", presets),
      typed("model"), typed("layers"), typed("ranks"), typed("gpu"),
      typed("sequence"), typed("batch"), choice("activations", ACTIVATIONS),
      // A message in a narrow field would wrap into many lines.
      el("div", { class: "calc-notes" }, Object.values(notes)),
      choice("precision", PRECISIONS), choice("offload", OFFLOADS)),
    ui.says, ui.bars, ui.traffic);
  addEventListener("hashchange", () => location.hash !== written && open());
  open();
  window.calculator = { compute, number, read };
})();
