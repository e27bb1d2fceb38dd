//! Workers whose effects are rows of a table, which a command lists.

use super::{RIGHT_KEY, Stage, worker};

const FAULTS: [&str; 4] = [
    "--faults",
    "kill-before-completed,kill-after-effect,freeze,redelivery",
    "--rounds",
    "6",
];

/// The command that lists the table of a round.
pub(super) fn list() -> String {
    format!(
        "ls \"$ONCEGATE_TRIAL_DIR\" > /dev/null && {}",
        worker("table.py", "list")
    )
}

/// The command that lists the effects of this worker, unless they are calls of the downstream
/// service.
pub(super) fn list_of(script: &str) -> Option<String> {
    match script {
        "table.py" => Some(list()),
        "file.py" => Some("cat \"$ONCEGATE_TRIAL_DIR/charges.jsonl\"".to_owned()),
        _ => None,
    }
}

// invariant: right-handlers-clean
#[tokio::test]
async fn effects_in_a_file_that_is_locked_are_no_defect() {
    let stage = Stage::new();
    let program = worker("file.py", "right");
    let list = list_of("file.py").unwrap_or_default();
    let flags = [
        "--handler-exec",
        &program,
        "--witness-command",
        &list,
        "--rounds",
        "6",
    ];
    let faults = ["--faults", "overlapping-runs,kill-then-duplicate,freeze"];
    stage
        .prove(RIGHT_KEY, &[&flags[..], &faults].concat())
        .await
        .ended(0);
}

// invariant: right-handlers-clean, planted-bugs-found
#[tokio::test]
async fn effects_in_a_table_of_each_round_are_judged() {
    let stage = Stage::new();
    let in_batches: &[&str] = &["--batch-messages", "3"];
    let cases = [
        ("right", &[][..], 0),
        ("right", in_batches, 0),
        ("without_unique_key", &[], 1),
        ("without_unique_key", in_batches, 1),
    ];
    for (bug, batches, code) in cases {
        let program = worker("table.py", bug);
        let list = list();
        let flags = ["--handler-exec", &program, "--witness-command", &list];
        let proved = stage
            .prove(RIGHT_KEY, &[&flags[..], &FAULTS, batches].concat())
            .await;
        let found = proved.ended(code).defects().contains(&"repeated-effect");
        assert_eq!(found, code == 1, "seed {}: {}", stage.seed, proved.out);
    }
}

// invariant: right-handlers-clean, planted-bugs-found
#[tokio::test]
async fn of_a_shared_table_a_round_judges_only_its_new_effects() {
    let stage = Stage::new();
    let folder = stage.dir.path().display();
    for (bug, code) in [("right", 0), ("without_unique_key", 1)] {
        let program = format!("{} {folder}", worker("table.py", bug));
        let list = format!("{} {folder}", worker("table.py", "list"));
        let flags = ["--handler-exec", &program, "--witness-command", &list];
        let faults = ["--faults", "kill-before-completed", "--rounds", "2"];
        let proved = stage
            .prove(RIGHT_KEY, &[&flags[..], &faults].concat())
            .await;
        let found = proved.ended(code).defects().contains(&"repeated-effect");
        assert_eq!(found, code == 1, "seed {}: {}", stage.seed, proved.out);
        let several = stage
            .prove(RIGHT_KEY, &[&flags[..], &["--parallel", "2"]].concat())
            .await;
        assert!(
            several.ended(2).err.contains("ONCEGATE_TRIAL_DIR"),
            "{}",
            several.err
        );
    }
}

#[tokio::test]
async fn a_witness_that_cannot_be_believed_ends_the_trial() {
    let stage = Stage::new();
    let program = worker("table.py", "right");
    for (list, says) in [
        (
            "ls $ONCEGATE_TRIAL_DIR > /dev/null; echo no table >&2; exit 3",
            "no table",
        ),
        (
            "ls $ONCEGATE_TRIAL_DIR > /dev/null; echo 7",
            "line 1 of --witness-command",
        ),
        (
            "ls $ONCEGATE_TRIAL_DIR > /dev/null",
            "no witness lists an effect",
        ),
        (
            "ls $ONCEGATE_TRIAL_DIR > /dev/null; echo '{\"amount\":40}'",
            "fits samples 4 and 5",
        ),
    ] {
        let flags = [
            "--handler-exec",
            &program,
            "--witness-command",
            list,
            "--rounds",
            "1",
        ];
        let proved = stage.prove(RIGHT_KEY, &flags).await;
        assert!(
            proved.ended(65).err.contains(says),
            "{list}: {}",
            proved.err
        );
    }
}
