"use strict";
(() => {
  const SVG = "http://www.w3.org/2000/svg";
  const tip = document.getElementById("tip");
  let owner = null; // the chart that the tip speaks for

  // Texts come from users: they are set as text, never as HTML.
  function say(name, lines, x, y) {
    const bold = document.createElement("b");
    bold.textContent = name;
    tip.replaceChildren(...(name ? [bold] : []), ...lines.flatMap((line, at) => (at ? [document.createElement("br"), line] : [line])));
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    const left = Math.min(Math.max(8, x + 14), innerWidth - box.width - 8);
    const above = y - box.height - 14;
    tip.style.transform = `translate(${Math.max(8, left)}px, ${above < 8 ? y + 18 : above}px)`;
  }

  function chart(holder) {
    const picture = holder.querySelector("svg");
    const groups = [...picture.querySelectorAll("g.series")].sort((a, b) => a.dataset.series - b.dataset.series);
    const panels = [...picture.querySelectorAll("g.panel")].map((panel) => ({
      name: panel.dataset.label,
      box: JSON.parse(panel.dataset.box),
      cells: JSON.parse(panel.dataset.cells),
    }));
    const points = groups.flatMap((group, series) =>
      JSON.parse(group.dataset.points).map(([x, y, of, value], at) => ({ group, series, at, x, y, of, value })));
    const bars = picture.classList.contains("bars");
    const ring = document.createElementNS(SVG, panels.length ? "rect" : "circle");
    ring.setAttribute("class", "ring");
    ring.setAttribute("r", 7);
    ring.style.display = "none";
    picture.append(ring);
    let current = null;

    const client = (x, y) => new DOMPoint(x, y).matrixTransform(picture.getScreenCTM());
    const inside = (event) => new DOMPoint(event.clientX, event.clientY).matrixTransform(picture.getScreenCTM().inverse());
    const seen = () => points.filter((point) => !point.group.classList.contains("off"));

    function focus(group) {
      picture.classList.toggle("focused", Boolean(group) && groups.length > 1);
      for (const other of groups) other.classList.toggle("focus", other === group);
    }
    function hide() {
      current = null;
      if (owner === holder) tip.hidden = true;
      ring.style.display = "none";
      focus(null);
    }
    function show(point) {
      [current, owner] = [point, holder];
      ring.setAttribute("cx", point.x);
      ring.setAttribute("cy", point.y);
      ring.style.display = "";
      focus(point.group);
      const at = client(point.x, point.y);
      say(groups.length > 1 ? point.group.dataset.label : "", [`${point.of}: ${point.value}`], at.x, at.y);
    }
    function showCell(panel, row, column) {
      const [left, top, width, height] = panel.box;
      const wide = width / panel.cells[0].length;
      const tall = height / panel.cells.length;
      [current, owner] = [{ panel, row, column }, holder];
      const place = { x: left + column * wide, y: top + row * tall, width: wide, height: tall };
      for (const [key, value] of Object.entries(place)) ring.setAttribute(key, value);
      ring.style.display = "";
      const at = client(place.x + wide / 2, place.y);
      say(panel.name, [`row ${row + 1}, column ${column + 1}: ${panel.cells[row][column]}`], at.x, at.y);
    }
    function nearest(event) {
      const { x, y } = inside(event);
      let best = null;
      let least = Infinity;
      for (const point of seen()) {
        // Bars are met anywhere in their row.
        const distance = bars ? Math.abs(point.y - y) + (x < 0 ? 1e3 : 0) : Math.hypot(point.x - x, point.y - y);
        if (distance < least) [best, least] = [point, distance];
      }
      return least < (bars ? 14 : 60) ? best : null;
    }
    function cellAt(event) {
      const { x, y } = inside(event);
      for (const panel of panels) {
        const [left, top, width, height] = panel.box;
        const column = Math.floor(((x - left) / width) * panel.cells[0].length);
        const row = Math.floor(((y - top) / height) * panel.cells.length);
        if (panel.cells[row] && panel.cells[row][column] !== undefined) return [panel, row, column];
      }
      return null;
    }
    function move(event) {
      if (event.target.closest && event.target.closest(".key")) return;
      if (panels.length) {
        const cell = cellAt(event);
        cell ? showCell(...cell) : hide();
      } else {
        const point = nearest(event);
        point ? show(point) : hide();
      }
    }
    picture.addEventListener("pointermove", move);
    picture.addEventListener("pointerdown", move);
    picture.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") hide(); });
    document.addEventListener("pointerdown", (event) => { if (current && !holder.contains(event.target)) hide(); });
    addEventListener("scroll", () => {
      if (!current) return;
      const { top, bottom } = ring.getBoundingClientRect();
      if (bottom < 0 || top > innerHeight) hide();
      else current.panel ? showCell(current.panel, current.row, current.column) : show(current);
    }, { passive: true });

    const ARROWS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
    function stepPoint(along, across) {
      const all = seen();
      if (!all.length) return;
      if (!current) return show(all[0]);
      if (bars) [along, across] = [across, along];
      if (along) {
        const own = all.filter((point) => point.group === current.group);
        return show(own[Math.min(own.length - 1, Math.max(0, own.indexOf(current) + along))]);
      }
      const shown = [...new Set(all.map((point) => point.series))];
      const series = shown[(shown.indexOf(current.series) + across + shown.length) % shown.length];
      const gap = (point) => (bars ? Math.abs(point.y - current.y) : Math.abs(point.x - current.x));
      show(all.filter((point) => point.series === series).reduce((best, point) => (gap(point) < gap(best) ? point : best)));
    }
    function stepCell(along, across) {
      if (!current) return showCell(panels[0], 0, 0);
      const { cells } = current.panel;
      const row = Math.min(cells.length - 1, Math.max(0, current.row + across));
      showCell(current.panel, row, Math.min(cells[0].length - 1, Math.max(0, current.column + along)));
    }
    holder.addEventListener("keydown", (event) => {
      if (event.key === "Escape") return hide();
      if (event.target !== holder || !ARROWS[event.key]) return;
      event.preventDefault();
      (panels.length ? stepCell : stepPoint)(...ARROWS[event.key]);
    });
    holder.addEventListener("focus", () => {
      if (holder.matches(":focus-visible") && !current) panels.length ? stepCell(0, 0) : stepPoint(0, 0);
    });
    holder.addEventListener("blur", hide);

    for (const key of picture.querySelectorAll(".key")) {
      const group = groups.find((other) => other.dataset.series === key.dataset.series);
      const toggle = () => {
        const off = group.classList.toggle("off");
        key.setAttribute("aria-pressed", String(!off));
        hide();
      };
      key.setAttribute("role", "button");
      key.setAttribute("tabindex", "0");
      key.setAttribute("aria-pressed", "true");
      key.setAttribute("aria-label", group.dataset.label);
      key.addEventListener("click", toggle);
      key.addEventListener("keydown", (event) => {
        if (event.key !== "Enter" && event.key !== " ") return;
        event.preventDefault();
        toggle();
      });
      for (const [enter, leave] of [["pointerenter", "pointerleave"], ["focus", "blur"]]) {
        key.addEventListener(enter, () => { hide(); focus(group.classList.contains("off") ? null : group); });
        key.addEventListener(leave, () => focus(null));
      }
    }
  }

  function copying(block) {
    const button = document.createElement("button");
    button.textContent = "Copy";
    block.classList.add("copying");
    block.prepend(button);
    button.addEventListener("click", async () => {
      try {
        await navigator.clipboard.writeText(block.querySelector("code").textContent);
        button.textContent = "Copied";
      } catch {
        getSelection().selectAllChildren(block.querySelector("code"));
        button.textContent = "Selected";
      }
      setTimeout(() => { button.textContent = "Copy"; }, 1500);
    });
  }

  // Tables that go on to the right fade there.
  function fading(table) {
    const mark = () => table.classList.toggle("more", table.scrollLeft + table.clientWidth < table.scrollWidth - 4);
    table.addEventListener("scroll", mark, { passive: true });
    new ResizeObserver(mark).observe(table);
  }

  function following() {
    const links = new Map([...document.querySelectorAll("nav a")].map((link) => [link.hash.slice(1), link]));
    const sections = [...document.querySelectorAll("section")];
    const mark = () => {
      const end = innerHeight + scrollY >= document.documentElement.scrollHeight - 2;
      const read = end ? sections.at(-1) : sections.findLast((part) => part.getBoundingClientRect().top < innerHeight / 3);
      for (const [id, link] of links) {
        if (id === (read || sections[0]).id) link.setAttribute("aria-current", "true");
        else link.removeAttribute("aria-current");
      }
    };
    if (links.size) {
      addEventListener("scroll", mark, { passive: true });
      mark();
    }
  }

  document.querySelectorAll("figure .wide, figure .narrow").forEach(chart);
  document.querySelectorAll(".code").forEach(copying);
  document.querySelectorAll(".scroll").forEach(fading);
  following();
})();
