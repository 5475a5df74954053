// The pods and GPUs that the page shows: the rows of its table, and the picture.
(() => {
  if (document.readyState === "loading") return null;  // A page that reloads itself may be half loaded.
  const indices = (row) => [...row.querySelectorAll(".gpus li")].map((gpu) => parseInt(gpu.textContent));
  const rows = [...document.querySelectorAll("#holders tbody tr")];
  const table = Object.fromEntries(rows.map((row) => [row.querySelector(".pod b").textContent, indices(row)]));
  const picture = {}, sick = [];
  for (const gpu of document.querySelectorAll(".picture .gpu")) {
    const [name, , ...lines] = [...gpu.querySelectorAll("text")].map((text) => text.textContent);
    const number = parseInt(name.slice("GPU ".length));
    if (gpu.classList.contains("held")) (picture[lines[0].split(" ")[1]] ??= []).push(number);
    if (gpu.classList.contains("sick")) sick.push(number);
  }
  Object.values(picture).forEach((gpus) => gpus.sort());
  return { table, picture, sick };
})()
