// The tape beside the source: the lines that run are marked, and a line moves the tape.
//
// It needs `<main data-file="layer.py">` and an element with the id `L123` for each line. Lines in
// the call stack of an event get a button with the number of these events.
(() => {
  "use strict";
  const { el, button, bytes, pageOf } = Tape;
  const main = document.querySelector("main[data-file]"), file = main.dataset.file;
  const line = number => document.getElementById(`L${number}`);
  // Milliseconds that the pointer rests on a line before the line moves the tape, and that the tape
  // stays at an event: longer after a scroll, because a reader has to find the line again.
  const REST_MS = 400, EVENT_MS = 700, SCROLLED_MS = 2000;
  const selected = () => !getSelection().isCollapsed;

  // Where the style sheet stacks the parts of the dock.
  const NARROW = "(max-width: 60rem)";

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

  // Has a line move the tape: `go()` goes to the next of its events.
  function wire(number, positions, go) {
    const node = line(number), many = positions.length;
    const label = `line ${number}: ${many} event${many > 1 ? "s" : ""} of the tape, go to the next`;
    // The number is drawn by the style sheet, because the text of a line is code to be copied.
    const mark = button("", event => {
      event.stopPropagation();
      go();
    }, { class: "tape-mark", "data-n": many, "aria-label": label, title: label });
    node.classList.add("tape-has");
    node.prepend(mark);
    mark.addEventListener("focus", () => mark.matches(":focus-visible") && go());
    // A reader who drags to copy text also ends with a click.
    node.addEventListener("click", event => event.target.closest("a") || selected() || go());
    return go;
  }

  // Moves the tape when the pointer rests on a line. A line that is marked stays, so that the
  // reader keeps the place; and while the tape plays the lines are not the reader's choice.
  function hover(player, moves) {
    let over = null, timer = null;
    const cancel = () => clearTimeout(timer);
    const rests = () => {
      const marked = over.matches(".tape-now, .tape-call");
      if (!marked && !player.playing && !selected()) moves.get(over)();
    };
    main.addEventListener("pointermove", event => {
      const node = event.target.closest(".line"), entered = node !== over;
      // The page may also scroll below a pointer that rests.
      if (event.pointerType !== "mouse" || !(event.movementX || event.movementY)) return;
      over = node;
      if (entered || event.buttons) cancel();
      if (entered && !event.buttons && moves.has(node)) timer = setTimeout(rests, REST_MS);
    });
    main.addEventListener("pointerleave", () => {
      cancel();
      over = null;
    });
    // A click moves the tape itself. Buttons keep the event, so it is taken on its way down.
    for (const kind of ["pointerdown", "click"]) main.addEventListener(kind, cancel, true);
    addEventListener("scroll", cancel, { passive: true });
  }

  // Marks the lines of this page that are in the call stack of the event: the innermost one, and
  // those that called it. Returns them.
  function mark(player) {
    main.querySelectorAll(".tape-now, .tape-call").forEach(node => {
      node.classList.remove("tape-now", "tape-call");
      node.removeAttribute("aria-current");
    });
    const here = player.lines.filter(([name]) => name === file).map(([, number]) => line(number))
      .filter(node => node);
    here.forEach((node, i) => node.classList.add(i ? "tape-call" : "tape-now"));
    if (here[0]) here[0].setAttribute("aria-current", "true");
    return here;
  }

  // Scrolls to the first line, if none of them is in sight between the bar and the dock. Returns
  // whether it scrolls.
  function scrollTo(nodes, dock) {
    const header = document.querySelector("header");
    const low = (header ? header.getBoundingClientRect().bottom : 0) + 30;
    const high = innerHeight - dock.offsetHeight - 30;
    const boxes = nodes.map(node => node.getBoundingClientRect());
    const seen = boxes.some(({ top, bottom }) => top >= low && bottom <= high);
    if (seen || !boxes.length) return false;
    scrollBy({ top: boxes[0].top - low - (high - low) * .4,
      behavior: Tape.still() ? "auto" : "smooth" });
    return true;
  }

  // -------------------------------------------------------------------------------------- dock

  const HINT = "A number beside a line says in how many events it runs. " +
    (matchMedia("(hover: none)").matches ? "Tap the line" :
      "Rest the pointer on the line, or click it,") + " to go to the next one.";

  // Links to the lines of the call stack, on this page or on another.
  function calls(player) {
    if (!player.index) return [el("li", { class: "hint" }, HINT)];
    return player.lines.map(([name, number, of], i) => {
      const here = name === file;
      const href = here ? `#L${number}` : `${pageOf(name)}#e=${player.index}`;
      return el("li", {}, [el("span", {}, i ? "called by " : "running "),
        el("a", { href, class: here && "here" }, `${name}:${number}`),
        ` ${of.split(".").pop()}`]);
    });
  }

  class Dock {
    constructor(player) {
      this.player = player;
      this.follows = false;
      this.scrolled = false;
      this.from = 0;
      this.stack = el("ol");
      this.live = el("span", { class: "tape-live" });
      this.follow = button("Follow", () => this.setFollows(!this.follows), {
        class: "tape-follow", title: "scroll to the line that runs" });
      this.full = el("a", { class: "tape-full" }, "full tape");
      this.toggle = button("", () => this.choose(this.node.hasAttribute("data-closed")),
        { class: "tape-toggle" });
      [this.parts, this.moveControls] = Tape.controls(player);
      [this.says, this.say] = Tape.sentence();
      this.node = this.arrange();
      document.body.append(this.node);
      this.move = Tape.pictures(player, this.node, {
        ".memory-here": width => Tape.drawMemory(player, { width, height: 84, labels: false }),
        ".layers-here": Tape.layersIn(player, { tight: true }),
      });
      player.pace = () => this.scrolled ? SCROLLED_MS : EVENT_MS;
      player.views.push(() => this.show());
    }

    arrange() {
      const { back, play, next, slider, count } = this.parts;
      return el("aside", { id: "dock", "aria-label": "The tape: one training step" }, [
        el("div", { class: "tape-bar" }, [this.toggle, back, play, next, slider, count, this.follow,
          this.full, this.says]),
        el("div", { class: "tape-body" }, [
          el("div", {}, this.stack),
          el("div", {}, [el("div", { class: "memory-here" }), this.live]),
          el("div", { class: "layers-here" }), Tape.drawLegend(false)[0]])]);
    }

    // A bar until the tape is used: whoever reads has the whole window.
    show() {
      const { player } = this;
      if (player.index && !stored("dock") && !matchMedia(NARROW).matches) this.setOpen(true);
      this.moveControls();
      this.move();
      this.say(player, player.says);
      this.stack.replaceChildren(...calls(player));
      this.live.textContent = `Memory of each rank: ${bytes(player.tape.live[player.index])}`;
      this.full.href = `tape.html#e=${player.index}&tape=${player.tape.key}`;
      const marked = mark(player);
      this.scrolled = this.follows && player.index !== this.from && scrollTo(marked, this.node);
      this.from = player.index;
    }

    reveal() {
      scrollTo(mark(this.player), this.node);
    }

    // The reader has chosen a line, so the page stays where it is.
    next(positions) {
      this.from = positions.find(i => i > this.player.index) || positions[0];
      this.player.jump(this.from);
    }

    setFollows(on) {
      this.follows = on;
      this.follow.setAttribute("aria-pressed", on);
      if (on) this.reveal();
    }

    setOpen(on) {
      this.node.toggleAttribute("data-closed", !on);
      this.toggle.textContent = on ? "▾ Tape" : "▴ Tape";
      this.toggle.setAttribute("aria-expanded", on);
    }

    choose(on) {
      this.setOpen(on);
      stored("dock", on ? "open" : "closed");
      if (this.follows) this.reveal();
    }
  }

  // A reader who scrolls by hand while the tape plays wants to read something else.
  function scrolling(player, dock) {
    const SCROLL = ["PageUp", "PageDown", "Home", "End", "ArrowUp", "ArrowDown", " "];
    const byHand = event =>
      player.playing && !dock.node.contains(event.target) && dock.setFollows(false);
    addEventListener("wheel", byHand, { passive: true });
    addEventListener("touchmove", byHand, { passive: true });
    addEventListener("keydown", event => SCROLL.includes(event.key) && byHand(event));
  }

  function keys(player, dock) {
    dock.node.addEventListener("keydown", event => {
      const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!by || event.target.matches("input")) return;
      event.preventDefault();
      player.step(by);
    });
  }

  // The dock covers nothing: the page ends above it, and scrolls to lines above it.
  function makeRoom(dock) {
    new ResizeObserver(() => {
      document.documentElement.style.setProperty("--dock", `${dock.node.offsetHeight}px`);
    }).observe(dock.node);
  }

  // `#e=57` in the address opens position 57, at its line.
  function address(player, dock) {
    const found = /#e=(\d+)/.exec(location.hash);
    if (!found) return;
    player.jump(+found[1]);
    dock.reveal();
  }

  Tape.load("2-prefetch", tape => {
    const player = new Tape.Player(tape), dock = new Dock(player);
    const moves = new Map([...eventsOf(tape)].map(([number, positions]) =>
      [line(number), wire(number, positions, () => dock.next(positions))]));
    main.classList.toggle("tape-lines", moves.size > 0);
    Tape.addPatterns();
    hover(player, moves);
    scrolling(player, dock);
    keys(player, dock);
    makeRoom(dock);
    dock.setOpen(stored("dock") === "open");
    dock.setFollows(false);
    player.show();
    addEventListener("hashchange", () => address(player, dock));
    address(player, dock);
    window.tape = player;
  });
})();
