// Keeps the page current: asks for it again, and replaces the parts that changed. Nothing here makes markup.
(() => {
  const PAUSE = 2000, PATIENCE = 8000;
  const fresh = document.getElementById("fresh"), spoken = document.getElementById("spoken");
  const parts = (root) => [...root.querySelectorAll("[data-part]")];
  // Each part as it was served. A shown part differs: its times are words, and its details may be open.
  const served = new Map(parts(document).map((part) => [part.id, part.outerHTML]));
  let tag = "", timer = 0, asking = false;

  const ago = (then) => {
    const seconds = Math.max(0, Math.round(Date.now() / 1000 - then));
    const steps = [[86400, "day"], [3600, "hour"], [60, "minute"]];
    for (const [length, unit] of steps) {
      const count = Math.floor(seconds / length);
      if (count) return `${count} ${unit}${count > 1 ? "s" : ""} ago`;
    }
    return seconds < 10 ? "just now" : "less than a minute ago";
  };
  const showTimes = () => {
    for (const time of document.querySelectorAll("time[data-at]")) {
      time.title ||= time.textContent;
      const words = ago(Number(time.dataset.at));
      if (time.textContent !== words) time.textContent = words;
    }
  };
  const replace = (now) => {
    const then = document.getElementById(now.id), focused = document.activeElement;
    const focus = then.contains(focused) ? focused.id : "";
    for (const { id } of then.querySelectorAll("details[open]")) now.querySelector(`#${id}`)?.setAttribute("open", "");
    const scrolled = [...then.querySelectorAll(".scroll")].map((box) => [box.id, box.scrollLeft]);
    then.replaceWith(now);
    for (const [id, left] of scrolled) document.getElementById(id)?.scrollTo(left, 0);
    if (focus) document.getElementById(focus)?.focus({ preventScroll: true });
  };
  const show = (page) => {
    for (const part of parts(page)) {
      const markup = part.outerHTML;
      if (served.get(part.id) === markup || !document.getElementById(part.id)) continue;
      served.set(part.id, markup);
      replace(document.adoptNode(part));
    }
    document.title = page.title;
    const words = page.getElementById("spoken").textContent;
    // A screen reader reads the text aloud whenever it is set.
    if (spoken.textContent !== words) spoken.textContent = words;
  };
  const state = (kind, words) => {
    document.documentElement.classList.toggle("lost-page", kind === "lost");
    fresh.className = `fresh ${kind}`;
    if (fresh.textContent !== words) fresh.textContent = words;
  };
  const ask = async () => {
    clearTimeout(timer);
    if (asking || document.hidden) return;
    asking = true;
    try {
      const headers = tag ? { "If-None-Match": tag } : {};
      const answer = await fetch(location.href, { headers, cache: "no-store", signal: AbortSignal.timeout(PATIENCE) });
      if (answer.status === 200) {
        const text = await answer.text();
        show(new DOMParser().parseFromString(text, "text/html"));
        tag = answer.headers.get("ETag") ?? "";
      } else if (answer.status !== 304) {
        throw new Error(answer.statusText);
      }
      state("live", "live");
    } catch {
      state("lost", "linkwise does not answer; what you see is old");
    }
    showTimes();
    asking = false;
    timer = setTimeout(ask, PAUSE);
  };
  document.addEventListener("visibilitychange", ask);
  ask();
})();
