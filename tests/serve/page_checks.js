// What tests of the page run in it; `own` is the page's engine view.
({
  // While sequences run, compare the drawing with the state of the stream every 20 ms.
  collect: async () => {
    const wrong = [];
    let rows = 0;
    const text = (id) => document.getElementById(id).textContent;
    for (let i = 0; i < 1000; i += 1) {
      await new Promise((done) => setTimeout(done, 20));
      own.draw();
      const { sequences, stats, numBlocks } = own.state;
      const running = [...sequences.values()].filter((each) => each.status === "running");
      if (running.length === 0 && rows === 0) continue;
      rows = Math.max(rows, running.length);
      if (running.length === 0) break;
      const blocks = running.flatMap(({ tables }) => tables.flatMap(([, held]) => held));
      const held = new Set(blocks).size;
      const items = [...document.querySelectorAll("#running li")];
      const drawn = items.map((row) => Number(row.dataset.id));
      const pairs = [
        ["held", held, Number(text("num-held"))],
        ["used", numBlocks - stats.num_free_blocks, Number(text("num-held"))],
        ["rows", running.map((each) => each.id).sort().join(), drawn.sort().join()],
        ["running", stats.num_running, Number.parseInt(text("num-running"), 10)],
        ["waiting", stats.num_waiting, Number(text("num-waiting"))],
      ];
      const [x, y, wide] = own.map.box(blocks[0]);
      const ratio = devicePixelRatio;
      const pixel = own.map.drawing.context.getImageData((x + 2) * ratio, (y + 8) * ratio, 1, 1).data;
      if (pixel[3] === 0) pairs.push(["a pixel of a held block", "painted", "empty"]);
      wrong.push(...pairs.filter(([, one, other]) => one !== other));
    }
    return { wrong, rows };
  },
  // Return the parts that a tip covers although it explains them: its element, section or button.
  covered: async () => {
    const tip = document.getElementById("tip");
    const box = (each) => each.getBoundingClientRect();
    const until = async (isSo) => {
      const end = performance.now() + 60_000;
      while (!isSo()) {
        if (performance.now() > end) throw new Error("the tip is not shown, or stays");
        await new Promise(requestAnimationFrame);
      }
    };
    const elements = [...document.querySelectorAll("#engine [data-tip]")];
    const covered = [];
    for (const element of elements) {
      element.scrollIntoView({ block: "nearest", behavior: "instant" });
      element.focus();
      await until(() => box(tip).height > 0);
      const section = element.closest(".buttons") ? document : element.closest("section");
      const own = element.closest("li, dl") ? "none" : "canvas, ol";
      const explained = element.closest(".buttons") ? "#running" : own;
      const { left, right, top, bottom } = box(tip);
      for (const each of [element, ...section.querySelectorAll(explained)]) {
        const other = box(each);
        if (left < other.right && other.left < right && top < other.bottom && other.top < bottom) {
          covered.push(`${element.outerHTML} ${each.outerHTML}`.slice(0, 200));
        }
      }
      element.blur();
      await until(() => box(tip).height === 0);
    }
    return { tips: elements.length, covered };
  },
  // Return what can be operated and has no name.
  nameless: () => [...document.querySelectorAll("button, input, textarea, canvas, [tabindex]")]
    .filter((each) => !each.closest("#numbers canvas") && !(each.getAttribute("aria-label")
      || each.labels?.length || each.textContent.trim() || each.closest("dl")))
    .map((each) => each.outerHTML),
})
