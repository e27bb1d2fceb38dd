// Compiled by scripts/release --check, as a user of the package would: what must have a type, and what must be refused.
import { Busy, Client } from "oncegate/functions";
import { DeadLetter, Later, Message, Retry, batchWorker, program, worker, type Origin } from "oncegate";

interface Order {
  order_id: string;
}

const charge = async (message: Message): Promise<{ charged: string }> => {
  const order = message.json<Order>();
  const payload: Buffer | null = message.payload;
  const topic: Origin | Record<string, never> = message.origin;
  if (!order.order_id) throw new DeadLetter("it is no order", { cause: topic });
  if (message.header("opens-at")) throw new Later("it is closed", { delayMs: 60_000 });
  if (message.attempt > 3) throw new Retry("later", { delayMs: 500 });
  await fetch("http://127.0.0.1/", { signal: message.signal, body: payload?.toString() ?? null });
  return { charged: order.order_id };
};

const done: Promise<void> = worker(charge, { maxInFlight: 8 });
const path: string = program();
const batches: Promise<void> = batchWorker(
  async (messages) => {
    const outcomes: (string | Error)[] = messages.map((message) => message.text() || new DeadLetter("it is empty"));
    return outcomes;
  },
  { maxInFlight: 2 },
);
const silent = batchWorker((messages) => {
  void messages.length;
});
void [done, batches, silent, path, charge(new Message({ payload: Buffer.from("{}") }))];

// @ts-expect-error a reason is text
new DeadLetter(7);
// @ts-expect-error there is no such option
worker(charge, { threads: 8 });
// @ts-expect-error an outcome for each message is an array
batchWorker((messages) => messages.length);
// @ts-expect-error a message cannot be changed
new Message({ payload: null }).attempt = 2;

const client = new Client({ scope: "nightly", tokenFile: "cron.token" });
const pages: Promise<number> = client.once({ job: "report" }, async ({ signal, number }) => number + Number(signal.aborted), {
  waitMs: 0,
  permanent: (error) => error instanceof TypeError,
});
const busy: (error: Busy) => number = ({ retryInMs }) => retryInMs;
void [pages, busy, client.close()];

// @ts-expect-error a client needs a scope
new Client({ url: "http://127.0.0.1:8081" });
// @ts-expect-error a key identifies something
client.once(null, () => 1);
