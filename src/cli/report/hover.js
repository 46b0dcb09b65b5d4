"use strict";
const plots = document.querySelector(".plots");
const charts = [...document.querySelectorAll(".chart")].map((svg) => ({
  points: svg.dataset.points.split(";").map((point) => point.split("|")),
  said: svg.closest(".row").querySelector("output"),
}));
const cursors = document.querySelectorAll(".cursor");
const show = (at) => {
  for (const cursor of cursors) {
    cursor.style.display = at === null ? "none" : "block";
    if (at !== null) cursor.style.left = at * 100 + "%";
  }
  for (const { points, said } of charts) {
    let best = null;
    for (const point of at === null ? [] : points)
      if (best === null || Math.abs(point[0] - at) < Math.abs(best[0] - at)) best = point;
    said.textContent = best === null ? "" : best[1];
  }
};
plots?.addEventListener("pointermove", (event) => {
  const box = plots.querySelector(".over").getBoundingClientRect();
  const at = (event.clientX - box.left) / box.width;
  show(at >= 0 && at <= 1 ? at : null);
});
plots?.addEventListener("pointerleave", () => show(null));
