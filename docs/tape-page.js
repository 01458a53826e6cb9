// The page of the tape: twelve recordings to choose from, and the source of the function that runs.
//
// `#e=57` in the address opens position 57, and `#e=57&tape=3-demand` the one of that recording.
(() => {
  "use strict";
  const { el, sum, button, bytes, pageOf } = Tape;
  const root = document.getElementById("tape");

  // -------------------------------------------------------------------------------------- code

  // The function that is running, scrolled to its line, and buttons for the calls that led there.
  function codeBox(player) {
    const calls = el("ol", { class: "tape-calls" });
    const code = el("pre", { tabindex: 0, "aria-label": "source of the function that runs" });
    // Nothing has been shown yet, not even that nothing runs.
    let chosen = 0, shown;
    const draw = () => {
      calls.replaceChildren(...player.lines.map(([file, line, name], i) => el("li", {},
        button(`${file}:${line} ${name}`, () => { chosen = i; draw(); },
          { "aria-pressed": i === chosen }))));
      const call = player.lines[chosen];
      if (!call) return code.replaceChildren("  Between two steps nothing of zero3 runs.");
      code.replaceChildren(...codeLines(...call));
      // Scroll the box and not the page.
      const now = code.querySelector(".now");
      code.scrollTop = now.offsetTop - code.clientHeight * .4;
    };
    return [[calls, code], () => {
      if (shown === player.event) return;
      shown = player.event;
      chosen = 0;
      draw();
    }];
  }

  function codeLines(file, at, name) {
    const { first, text } = TAPES.source[`${file}:${name}`], rows = text.split("\n");
    const indent = Math.min(...rows.filter(row => row.trim()).map(row => row.search(/\S/)));
    let quoted = false;
    return rows.map((row, i) => {
      const number = first + i, marks = row.split('"""').length - 1, quiet = quoted || marks > 0;
      quoted = quoted !== (marks % 2 === 1);
      const [, before, comment] = /^([^#]*)(#.*)?$/.exec(row.trimStart());
      const now = number === at;
      // Only lines of code have a place on the source's page.
      const href = before.trim() && !quiet ? `${pageOf(file)}#L${number}` : null;
      // The style sheet indents a line: its parts, if it is broken, further than its beginning.
      const style = `--indent:${Math.max(0, row.search(/\S/) - indent)}ch`;
      return el("div", { class: now && "now", "aria-current": now, style }, [
        el("a", { href }, String(number)),
        el("span", { class: quiet && "quiet" }, before),
        el("span", { class: "quiet" }, comment || "")]);
    });
  }

  // ---------------------------------------------------------------------------------- the page

  // Buttons to choose among the recordings.
  function choice(player) {
    // A recording takes a moment to come. By then another button may have been pressed, which says
    // nothing of the first choice; and files may come in another order than they were asked for.
    let asked = {};
    const choose = wanted => {
      const own = asked = { ...player.tape, ...asked, ...wanted };
      const { world_size: ranks, prefetch, leave } = own;
      Tape.load(`${ranks}-${prefetch ? "prefetch" : "demand"}${leave ? "-leave" : ""}`, tape => {
        if (asked !== own) return;
        asked = {};
        player.change(tape);
      });
    };
    const ranks = [1, 2, 3].map(n =>
      button(String(n), () => choose({ world_size: n }), { "aria-label": `ranks: ${n}` }));
    const fetch = [true, false].map(on =>
      button(on ? "on" : "off", () => choose({ prefetch: on }),
        { "aria-label": `prefetch: ${on ? "on" : "off"}` }));
    const saved = [false, true].map(on =>
      button(on ? "leave" : "stay", () => choose({ leave: on }),
        { "aria-label": `activations: ${on ? "leave" : "stay"}` }));
    const group = (name, buttons) => el("span", { class: "tape-group", role: "group",
      "aria-label": name }, [name, buttons]);
    const groups = [group("Ranks", ranks), group("Prefetch", fetch), group("Activations", saved)];
    return [groups, () => {
      ranks.forEach((b, i) => b.setAttribute("aria-pressed", player.tape.world_size === i + 1));
      fetch.forEach((b, i) => b.setAttribute("aria-pressed", player.tape.prefetch === !i));
      saved.forEach((b, i) => b.setAttribute("aria-pressed", player.tape.leave === !!i));
    }];
  }

  const SPEEDS = { slow: 1600, normal: 700, fast: 250 };

  function speed(player) {
    const select = el("select", { onchange: () => { player.pace = () => SPEEDS[select.value]; } },
      Object.keys(SPEEDS).map(name =>
        el("option", name === "normal" ? { selected: "" } : {}, name)));
    return el("label", {}, ["Speed ", select]);
  }

  function phases(player) {
    const names = [...new Set(player.tape.events.map(e => e.phase))];
    const buttons = names.map(phase => button(phase, () =>
      player.jump(player.tape.events.findIndex(e => e.phase === phase) + 1)));
    return [buttons, () => buttons.forEach(b =>
      b.setAttribute("aria-pressed", b.textContent === player.phase))];
  }

  function note(tape) {
    const how = tape.prefetch ? "The layers are in a chain, and each is gathered while the one " +
      "before it computes." : "The layers are in no chain. Each is gathered when it is called, " +
      "and its gradient is reduced before backward goes on.";
    const sent = tape.world_size > 1 ? `Each rank sends ${bytes(tape.sent_bytes)} in this step.` :
      "A rank alone sends nothing.";
    const saved = tape.leave ? `Each rank saves activations of ${bytes(sum(tape.allSaved))} for ` +
      `backward; at most ${bytes(Math.max(...tape.saved))} of them are in memory at once. ` : "";
    return `${how} ${saved}${sent} ${Tape.origin(tape)}`;
  }

  // The elements of the page, and a function that shows the player's position in each.
  function views(player) {
    const [controls, moveControls] = Tape.controls(player), [says, say] = Tape.sentence();
    const [chosen, showChoice] = choice(player), [named, showPhase] = phases(player);
    const [box, drawCode] = codeBox(player), [legend, count] = Tape.drawLegend(true);
    const live = el("span"), about = el("p", { class: "tape-note" });
    const show = () => {
      const { tape } = player, now = tape.live[player.index];
      [moveControls, showChoice, showPhase, drawCode].forEach(view => view());
      count(player);
      say(player, player.says);
      live.textContent = bytes(now) + (now === tape.peak_bytes ? ", the predicted peak" :
        now === tape.rest_bytes ? ", as predicted at rest" : "");
      about.textContent = note(tape);
    };
    return [{ ...controls, says, chosen, named, box, legend, live, about }, show];
  }

  function arrange(player, parts) {
    const bar = (...children) => el("div", { class: "tape-bar" }, children);
    root.replaceChildren(
      bar(parts.chosen, el("span", { class: "tape-group" }, parts.named), speed(player)),
      el("div", { class: "tape-controls" }, [
        bar(parts.back, parts.play, parts.next, parts.slider, parts.count), parts.says]),
      el("div", { class: "tape-body" }, [
        el("div", {}, [
          el("h2", {}, ["Memory of each rank", parts.live]), el("div", { class: "memory-here" }),
          el("h2", {}, "Layers on each rank"), el("div", { class: "layers-here" }),
          parts.legend, parts.about]),
        el("div", { class: "tape-code" }, [el("h2", {}, "Source line"), parts.box])]));
  }

  function open(tape) {
    const player = new Tape.Player(tape), [parts, show] = views(player);
    arrange(player, parts);
    Tape.addPatterns();
    const move = Tape.pictures(player, root, {
      ".memory-here": width => Tape.drawMemory(player, { width, height: 220, labels: true }),
      ".layers-here": Tape.layersIn(player, {}),
    });
    player.views.push(show, move, remember, () =>
      root.classList.toggle("playing", player.playing));
    return player;
  }

  // ------------------------------------------------------------------------------- the address

  // The position and the recording that the address names, if it names them.
  const askedIndex = () => (/[#&]e=(\d+)/.exec(location.hash) || [])[1];
  const askedTape = () => (/[#&]tape=([123]-(?:prefetch|demand)(?:-leave)?)(?![\w-])/.exec(location.hash) ||
    [])[1];
  let saving = null;

  // Browsers limit the number of updates, so wait until the tape rests.
  function remember(player) {
    clearTimeout(saving);
    const hash = `#e=${player.index}&tape=${player.tape.key}`;
    // A page that nobody has touched has no position in its address.
    const moved = player.index || askedIndex();
    if (!player.playing && moved && location.hash !== hash) {
      saving = setTimeout(() => history.replaceState(null, "", hash), 200);
    }
  }

  function follow(player) {
    const index = askedIndex();
    if (!index) return;
    Tape.load(askedTape() || "2-prefetch", tape => {
      player.tape = tape;
      player.jump(+index);
    });
  }

  // Links in the text lead to an event of the recording that they speak of.
  function link(player, node) {
    node.addEventListener("click", event => {
      event.preventDefault();
      Tape.load(node.dataset.tape, tape => {
        player.tape = tape;
        player.jump(+node.dataset.event);
        root.scrollIntoView({ behavior: Tape.still() ? "auto" : "smooth" });
      });
    });
  }

  function keys(player) {
    addEventListener("keydown", event => {
      const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      const other = event.altKey || event.ctrlKey || event.metaKey || event.shiftKey;
      if (!by || other || event.target.closest("input, select, textarea, pre")) return;
      event.preventDefault();
      player.step(by);
    });
  }

  // What only works with this script is explained only with it.
  document.querySelectorAll(".tape-how").forEach(node => { node.hidden = false; });
  Tape.load("2-prefetch", tape => {
    const player = open(tape);
    keys(player);
    document.querySelectorAll("a[data-event]").forEach(node => link(player, node));
    addEventListener("hashchange", () => follow(player));
    if (askedIndex()) {
      player.show();
      follow(player);
    } else {
      Tape.playOnce(player, root.querySelector(".memory-here"));
    }
    window.tape = player;
  });
})();
