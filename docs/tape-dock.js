// The tape beside the source: the lines that run are marked, and a line moves the tape.
//
// It needs `<main data-file="layer.py">` and an element with the id `L123` for each line. Lines that
// occur in the call stack of an event get a button with the number of these events.
(() => {
  "use strict";
  const { el, button, bytes, pageOf } = Tape;
  const main = document.querySelector("main[data-file]"), file = main.dataset.file;
  const line = number => document.getElementById(`L${number}`);

  // A page that is opened from a file may have no storage. Then a choice lasts as long as the page.
  function stored(key, value) {
    try {
      if (value) localStorage.setItem(key, value);
      return localStorage.getItem(key);
    } catch (error) {
      return null;
    }
  }

  // ------------------------------------------------------------------------------------- lines

  // The events of each line of this page, as positions.
  function eventsOf(tape) {
    const found = new Map();
    tape.events.forEach((event, i) => {
      const here = event.lines.filter(([name]) => name === file).map(([, number]) => number);
      for (const number of new Set(here)) {
        if (line(number)) found.set(number, [...found.get(number) || [], i + 1]);
      }
    });
    return found;
  }

  // Has a line move the tape: `next(positions)` goes to the next of its events.
  function wire(number, positions, next) {
    const node = line(number), many = positions.length, go = () => next(positions);
    const label = `line ${number}: ${many} event${many > 1 ? "s" : ""} of the tape, go to the next`;
    // The number is drawn by the style sheet, because the text of a line is code to be copied.
    const mark = button("", event => {
      event.stopPropagation();
      go();
    }, { class: "tape-mark", "data-n": many, "aria-label": label, title: label });
    node.classList.add("tape-has");
    node.prepend(mark);
    mark.addEventListener("focus", () => mark.matches(":focus-visible") && go());
    node.addEventListener("click", event => event.target.closest("a") || go());
    return go;
  }

  // Moves the tape when the pointer enters a line. The page may also scroll below a pointer that
  // rests, and while the tape plays the lines are not the reader's choice.
  function hover(player, moves) {
    let over = null;
    main.addEventListener("pointermove", event => {
      const node = event.target.closest(".line"), entered = node !== over;
      if (event.pointerType !== "mouse" || !(event.movementX || event.movementY)) return;
      over = node;
      if (entered && moves.has(node) && !player.playing) moves.get(node)();
    });
  }

  // Marks the lines of this page that are in the call stack of the event: the innermost one, and
  // those that called it.
  function mark(player) {
    main.querySelectorAll(".tape-now, .tape-call").forEach(node => {
      node.classList.remove("tape-now", "tape-call");
      node.removeAttribute("aria-current");
    });
    const here = player.lines.filter(([name]) => name === file).map(([, number]) => line(number))
      .filter(node => node);
    here.forEach((node, i) => node.classList.add(i ? "tape-call" : "tape-now"));
    if (here[0]) here[0].setAttribute("aria-current", "true");
  }

  // Scrolls only if the line is not in sight between the bar and the dock.
  function scrollTo(node, dock) {
    const { top, bottom } = node.getBoundingClientRect(), header = document.querySelector("header");
    const low = (header ? header.getBoundingClientRect().bottom : 0) + 30;
    const high = innerHeight - dock.offsetHeight - 30;
    if (top >= low && bottom <= high) return;
    scrollBy({ top: top - low - (high - low) * .4, behavior: Tape.still() ? "auto" : "smooth" });
  }

  // -------------------------------------------------------------------------------------- dock

  // Links to the lines of the call stack, on this page or on another.
  function calls(player) {
    const hint = "A number beside a line says in how many events it runs. Point at the line to go " +
      "to the next one.";
    return !player.index ? el("li", { class: "hint" }, hint) : player.lines.map(([name, number, of], i) => el("li", {}, [
      el("span", {}, i ? "called by " : "running "),
      el("a", { href: name === file ? `#L${number}` : `${pageOf(name)}#e=${player.index}`,
        class: name === file && "here" }, `${name}:${number}`), ` ${of.split(".").pop()}`]));
  }

  function open(tape) {
    const player = new Tape.Player(tape), events = eventsOf(tape);
    const [parts, moveControls] = Tape.controls(player), [says, say] = Tape.sentence();
    const stack = el("ol"), live = el("span", { class: "tape-live" });
    let follows = true, from = 0;
    const follow = button("Follow", () => setFollows(!follows), {
      class: "tape-follow", title: "scroll to the line that runs" });
    const toggle = button("", () => {
      setOpen(dock.hasAttribute("data-closed"));
      stored("dock", dock.hasAttribute("data-closed") ? "closed" : "open");
      if (player.index) reveal();
    }, { class: "tape-toggle" });
    const dock = el("aside", { id: "dock", "aria-label": "The tape: one training step" }, [
      el("div", { class: "tape-bar" }, [toggle, parts.back, parts.play, parts.next, parts.slider,
        parts.count, follow, el("a", { href: "tape.html", class: "tape-full" }, "full tape"), says]),
      el("div", { class: "tape-body" }, [
        el("div", { class: "dock-says" }, stack),
        el("div", {}, [el("div", { class: "memory-here" }), live]),
        el("div", { class: "layers-here" })])]);

    function setFollows(on) {
      follows = on;
      follow.setAttribute("aria-pressed", on);
      if (on && player.index) reveal();
    }

    function reveal() {
      const node = main.querySelector(".tape-now");
      if (node && follows) scrollTo(node, dock);
    }

    // The reader has chosen a line, so the page stays where it is.
    function next(positions) {
      from = positions.find(i => i > player.index) || positions[0];
      player.jump(from);
    }

    function setOpen(on) {
      dock.toggleAttribute("data-closed", !on);
      toggle.textContent = on ? "▾ Tape" : "▴ Tape";
      toggle.setAttribute("aria-expanded", on);
    }

    document.body.append(dock);
    Tape.addPatterns();
    const move = Tape.pictures(player, dock, {
      ".memory-here": width => Tape.drawMemory(player, { width, height: 84, labels: false }),
      ".layers-here": Tape.layersIn(player, { tight: true }),
    });
    player.views.push(() => {
      moveControls();
      move();
      say(player, player.says);
      stack.replaceChildren(...[calls(player)].flat());
      live.textContent = `Memory of each rank: ${bytes(tape.live[player.index])}`;
      mark(player);
      if (player.index !== from) reveal();
      from = player.index;
    });
    const moves = new Map([...events].map(([number, positions]) =>
      [line(number), wire(number, positions, next)]));
    main.classList.toggle("tape-lines", moves.size > 0);
    hover(player, moves);
    scrolling(player, dock, () => setFollows(false));
    keys(player, dock);
    makeRoom(dock);
    setOpen((stored("dock") || (innerWidth > 700 ? "open" : "closed")) === "open");
    setFollows(true);
    player.show();
    const asked = () => {
      const found = /#e=(\d+)/.exec(location.hash);
      if (found) player.jump(+found[1]);
    };
    addEventListener("hashchange", asked);
    asked();
    return player;
  }

  // A reader who scrolls by hand while the tape plays wants to read something else.
  function scrolling(player, dock, stop) {
    const SCROLL = ["PageUp", "PageDown", "Home", "End", "ArrowUp", "ArrowDown", " "];
    const byHand = event => player.playing && !dock.contains(event.target) && stop();
    addEventListener("wheel", byHand, { passive: true });
    addEventListener("touchmove", byHand, { passive: true });
    addEventListener("keydown", event => SCROLL.includes(event.key) && byHand(event));
  }

  function keys(player, dock) {
    dock.addEventListener("keydown", event => {
      const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!by || event.target.matches("input")) return;
      event.preventDefault();
      player.step(by);
    });
  }

  // The dock covers nothing: the page ends above it, and scrolls to lines above it.
  function makeRoom(dock) {
    new ResizeObserver(() => {
      document.documentElement.style.setProperty("--dock", `${dock.offsetHeight}px`);
    }).observe(dock);
  }

  Tape.load("2-prefetch", tape => { window.tape = open(tape); });
})();
