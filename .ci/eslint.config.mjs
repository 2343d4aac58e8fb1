// For `make lint`.  The viewer's scripts share one scope: what one declares at its top, the others may use.
import { readFileSync, readdirSync } from "node:fs";

const FOLDER = new URL("../src/groupwise/viewer/static/", import.meta.url);
const shared = readdirSync(FOLDER)
  .filter((name) => name.endsWith(".js"))
  .flatMap((name) => [
    ...readFileSync(new URL(name, FOLDER), "utf8").matchAll(/^(?:async )?(?:function\*?|const|let|class) ([\w$]+)/gm),
  ])
  .map((match) => match[1]);
const browser =
  "FormData IntersectionObserver MutationObserver ResizeObserver URLSearchParams addEventListener clearTimeout " +
  "devicePixelRatio document fetch getComputedStyle history innerHeight innerWidth localStorage location matchMedia " +
  "navigator scrollTo setTimeout uPlot";

export default [
  {
    files: ["**/*.js"],
    languageOptions: {
      ecmaVersion: 2022,
      sourceType: "script",
      globals: Object.fromEntries([...shared, ...browser.split(" ")].map((name) => [name, "writable"])),
    },
    rules: {
      "no-undef": "error",
      "no-unused-vars": ["error", { vars: "local", caughtErrors: "none" }],
      "no-dupe-keys": "error",
      "no-dupe-args": "error",
      "no-unreachable": "error",
      "no-fallthrough": "error",
      "no-const-assign": "error",
      "no-self-assign": "error",
      "no-self-compare": "error",
      "no-cond-assign": "error",
      "no-eval": "error",
      "no-implied-eval": "error",
      "no-new-func": "error",
      "no-var": "error",
      eqeqeq: "error",
    },
  },
];
