// The first page's tape: it plays once, scene by scene, as soon as a reader sees it.
//
// Without this script the page shows a figure of the same step, in the same element.
(() => {
  "use strict";
  const { el, bytes } = Tape;
  const root = document.getElementById("tape");
  const SCENE_MS = 2300;

  // Each scene takes equally long, so that its sentence can be read.
  function pace({ tape, index }) {
    const at = Tape.sceneAt(tape, index);
    const ends = at + 1 < tape.scenes.length ? tape.scenes[at + 1][0] : tape.count + 1;
    return SCENE_MS / (ends - tape.scenes[at][0]);
  }

  function open(tape) {
    const player = new Tape.Player(tape);
    player.pace = pace;
    const [parts, moveControls] = Tape.controls(player), [says, say] = Tape.sentence();
    const [legend] = Tape.drawLegend(false), live = el("span"), full = el("a", {}, "every event");
    const source = el("a", {}, "with the source");
    root.replaceChildren(
      el("h2", {}, ["Memory of each rank, in one training step", live]),
      el("div", { class: "memory-here" }),
      el("div", { class: "layers-here" }),
      says,
      el("div", { class: "tape-bar" }, [parts.play, parts.slider]),
      legend,
      el("p", { class: "tape-links" }, ["Each step up allocates memory, and each step down frees ",
        "it. Look at ", full, ", or at the step ", source, `. ${Tape.origin(tape)}`]));
    Tape.addPatterns();
    const move = Tape.pictures(player, root, {
      ".memory-here": width => Tape.drawMemory(player, { width, height: 190, labels: true }),
      ".layers-here": Tape.layersIn(player, {}),
    });
    player.views.push(() => {
      moveControls();
      move();
      say(player, player.scene);
      live.textContent = bytes(tape.live[player.index]);
      full.href = `tape.html#e=${player.index || 1}`;
      source.href = `layer.html#e=${player.index || 1}`;
      root.classList.toggle("playing", player.playing);
    });
    return player;
  }

  Tape.load("2-prefetch", tape => {
    const player = open(tape);
    // Below the pictures is the sentence: where it is in sight, a reader can follow.
    Tape.playOnce(player, root.querySelector(".tape-says"));
    window.tape = player;
  });
})();
