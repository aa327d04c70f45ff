// Bundles each entry of src/ into src/polyhead/report/assets/, with a digest of the sources at its head.
import { createHash } from "node:crypto";
import { mkdir, readdir, readFile, writeFile } from "node:fs/promises";
import { dirname, join, relative, sep } from "node:path";
import { fileURLToPath } from "node:url";
import { build } from "esbuild";

const here = dirname(fileURLToPath(import.meta.url));
const assets = process.argv[2] ?? join(here, "..", "src", "polyhead", "report", "assets");

const CONFIGURATION = ["build.mjs", "package.json", "package-lock.json", "tsconfig.json"];

async function filesUnder(folder, recursive) {
  const entries = await readdir(join(here, folder), { recursive, withFileTypes: true });
  const files = entries.filter((one) => one.isFile()).map((one) => join(one.parentPath, one.name));
  return files.map((file) => relative(here, file).split(sep).join("/"));
}

// All files that a bundle can depend on. tests/report/test_assets.py computes the same digest without Node.
async function sourcesOf(bundle) {
  const shared = [...(await filesUnder("src", false)), ...(await filesUnder("src/parts", true))];
  return [...CONFIGURATION, ...shared, ...(await filesUnder(`src/${bundle}`, true))].sort();
}

async function digestOf(bundle) {
  const hash = createHash("sha256");
  for (const name of await sourcesOf(bundle)) {
    const content = await readFile(join(here, name));
    hash.update(`${name}\n${content.length}\n`);
    hash.update(content);
  }
  return hash.digest("hex");
}

const bundles = (await filesUnder("src", true)).flatMap((name) => /^src\/([a-z]+)\/main\.tsx$/.exec(name)?.[1] ?? []);
const bundled = new Set();
await mkdir(assets, { recursive: true });
for (const bundle of bundles.sort()) {
  const banner = `/* polyhead front end, built by "make frontend" from sources ${await digestOf(bundle)} */`;
  const { metafile } = await build({
    absWorkingDir: here,
    entryPoints: [`src/${bundle}/main.tsx`],
    outfile: join(assets, `${bundle}.js`),
    bundle: true,
    minify: true,
    format: "iife",
    target: "es2022",
    charset: "utf8",
    legalComments: "none",
    jsx: "automatic",
    jsxImportSource: "preact",
    banner: { js: banner, css: banner },
    metafile: true,
    logLevel: "info",
  });
  const inputs = Object.values(metafile.outputs).flatMap((output) => Object.entries(output.inputs));
  for (const [input, { bytesInOutput }] of inputs) {
    if (bytesInOutput === 0) continue;
    const match = /^node_modules\/((?:@[^/]+\/)?[^/]+)\//.exec(input);
    if (match) bundled.add(match[1]);
  }
}

// The licences of all bundled packages.
async function licences() {
  const texts = [];
  for (const name of [...bundled].sort()) {
    const folder = join(here, "node_modules", name);
    const { version, license } = JSON.parse(await readFile(join(folder, "package.json"), "utf8"));
    const file = (await readdir(folder)).find((one) => /^licen[cs]e/i.test(one));
    if (!file) throw new Error(`${name} is bundled, so it must have a licence file`);
    texts.push(`${name} ${version} (${license})\n\n${(await readFile(join(folder, file), "utf8")).trim()}\n`);
  }
  return texts.join(`\n${"-".repeat(80)}\n\n`);
}

await writeFile(join(assets, "LICENSES.txt"), await licences());
