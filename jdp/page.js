// Tips, zoom, and rows that light up their stretches of the timeline. Without it the page reads on.
for (const root of document.querySelectorAll(".jdp:not([data-live])")) {
  root.dataset.live = "";
  const tip = root.appendChild(document.createElement("div"));
  tip.className = "tip";
  tip.hidden = true;
  const told = (event) => event.target.closest?.("[title], [data-tip]");
  const show = (event) => {
    const on = told(event);
    if (!on || !root.contains(on)) return;
    if (on.title) {
      on.dataset.tip = on.title;
      if (!on.textContent) on.setAttribute("aria-label", on.title);
      on.removeAttribute("title");
    }
    tip.textContent = on.dataset.tip;
    tip.hidden = false;
    const at = on.getBoundingClientRect();
    const x = event.clientX ?? at.left;
    const left = Math.min(x + 12, innerWidth - tip.offsetWidth - 8);
    const below = Math.min(at.bottom, innerHeight) + 6;
    const fits = below + tip.offsetHeight < innerHeight;
    tip.style.left = Math.max(8, left) + "px";
    tip.style.top = (fits ? below : Math.max(8, at.top - tip.offsetHeight - 6)) + "px";
  };
  const light = (event, lit) => {
    const row = event.target.closest?.("[data-row]")?.dataset.row;
    if (row === undefined) return;
    for (const x of root.querySelectorAll(`[data-row="${row}"]`)) x.classList.toggle("lit", lit);
  };
  for (const [on, off] of [["pointerover", "pointerout"], ["focusin", "focusout"]]) {
    root.addEventListener(on, (event) => { show(event); light(event, true); });
    root.addEventListener(off, (event) => { tip.hidden = true; light(event, false); });
  }
  const time = root.querySelector(".time");
  if (!time) continue;
  const track = time.querySelector(".track");
  const ticks = time.querySelector(".ticks");
  const step = Number(track.dataset.us);
  const words = (us) => {
    const unit = us >= 1e6 ? [1e6, "s"] : us >= 1e3 ? [1e3, "ms"] : [1, "µs"];
    return Number((us / unit[0]).toPrecision(3)) + " " + unit[1];
  };
  // Round numbers, about 110 pixels apart, between the two ends of the step.
  const marks = () => {
    const raw = (step * 110) / Math.max(1, track.clientWidth);
    const ten = 10 ** Math.floor(Math.log10(raw));
    const by = ten * [1, 2, 5, 10].find((k) => k * ten >= raw);
    const count = Math.min(2000, Math.floor(step / by - 0.6));
    const at = [0, ...Array.from({ length: Math.max(0, count) }, (_, k) => (k + 1) * by), step];
    return at.map((us) => {
      const mark = document.createElement("span");
      mark.style.left = (100 * us) / step + "%";
      mark.textContent = us ? words(us) : "0";
      return mark;
    });
  };
  let zoom = 1;
  const scale = (wanted, centre = 0.5) => {
    const before = (time.scrollLeft + centre * time.clientWidth) / zoom;
    zoom = Math.max(1, Math.min(400, wanted));
    track.style.width = 100 * zoom + "%";
    time.scrollLeft = before * zoom - centre * time.clientWidth;
    ticks.replaceChildren(...marks());
    for (const x of track.querySelectorAll("a[data-name]")) {
      const wide = x.getBoundingClientRect().width > 40;
      x.classList.toggle("wide", wide);
      x.textContent = wide ? x.dataset.name : "";
    }
  };
  const keys = {
    "+": () => scale(zoom * 1.6), "=": () => scale(zoom * 1.6), "-": () => scale(zoom / 1.6),
    "0": () => scale(1), Home: () => (time.scrollLeft = 0),
    End: () => (time.scrollLeft = time.scrollWidth),
    ArrowLeft: () => (time.scrollLeft -= 80), ArrowRight: () => (time.scrollLeft += 80),
  };
  time.addEventListener("keydown", (event) => {
    if (!keys[event.key] || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    keys[event.key]();
  });
  time.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.altKey) return;
    event.preventDefault();
    const centre = (event.clientX - time.getBoundingClientRect().left) / time.clientWidth;
    scale(zoom * Math.exp(-event.deltaY / 200), centre);
  }, { passive: false });
  for (const x of root.querySelectorAll("[data-zoom]")) {
    x.hidden = false;
    x.addEventListener("click", () => scale(x.dataset.zoom === "1" ? 1 : zoom * x.dataset.zoom));
  }
  scale(1);
  new ResizeObserver(() => scale(zoom)).observe(time);
}
