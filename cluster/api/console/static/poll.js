// What is asked for again and again while it is shown.

const PERIOD_MS = 3000;

/** `ask(signal)` now, every few seconds, and when told to; its errors go to `onError`. Asks no more
 * once `element` has left the page. */
export function poll(element, ask, onError) {
  const stop = new AbortController();
  let timer = null;
  let isAsking = false;
  let again = false;

  async function run() {
    clearTimeout(timer);
    if (isAsking) {
      again = true;
      return;
    }
    isAsking = true;
    try {
      if (!document.hidden) await ask(stop.signal);
    } catch (error) {
      if (error.name !== "AbortError") onError(error);
    }
    isAsking = false;
    if (stop.signal.aborted || !element.isConnected) return;
    timer = setTimeout(run, again ? 0 : PERIOD_MS);
    again = false;
  }

  return {
    run,
    stop() {
      stop.abort();
      clearTimeout(timer);
    },
  };
}
