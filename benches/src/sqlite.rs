//! The embedded store, against the database's own batched writes.

use crate::Benchmark;
use crate::figure::Figure;
use crate::rounds::Plan;

pub(crate) const BENCHMARK: Benchmark = Benchmark {
    name: "sqlite",
    question: "claim and complete on the embedded store, 64 in flight, against batched writes by hand",
    run: |plan| Box::pin(run(plan)),
};

async fn run(_: &Plan) -> Vec<Figure> {
    vec![]
}
