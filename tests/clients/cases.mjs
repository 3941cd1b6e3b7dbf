// What the scripts of node's clients share: their cases, and one line of JSON for each result.

export const [baseURL, model] = process.argv.slice(2);
export const WEATHER = "What is the weather in Paris?";
export const PERSON = "Extract name and age as JSON: Anna is 25 and lives in Paris.";
export const PARAMETERS = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
export const DESCRIPTION = "Get the weather of a city";
export const SUNNY = { temperature: 18, condition: "sunny" };

/** Run functions that throw if the client isn't served as it expects. */
export async function run(cases) {
  for (const [name, act] of Object.entries(cases)) {
    let error = "";
    try {
      await act();
    } catch (problem) {
      console.error(problem);
      error = `${problem.name}: ${problem.message}`.slice(0, 500);
    }
    console.log(JSON.stringify({ case: name, error }));
  }
  process.exit(0);
}
