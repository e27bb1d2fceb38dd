//! The rights that a role needs on the tables, and which of them it lacks.

use deadpool_postgres::Object;

use super::errors::{self, Trouble};
use super::schema::{self, quoted};

/// A table, and what a role needs on it.
struct Needed {
    table: &'static str,
    rights: &'static [&'static str],
    /// The only user of these rights; `None` if every consumer needs them.
    by: Option<&'static str>,
}

impl Needed {
    /// The rights on this table among these pairs, if there are any.
    fn of(&self, lacking: &[(String, String)]) -> Option<String> {
        let rights: Vec<&str> = lacking
            .iter()
            .filter(|(table, _)| table == self.table)
            .map(|(_, right)| right.as_str())
            .collect();
        (!rights.is_empty()).then(|| rights.join(", "))
    }
}

const READ_AND_WRITE: &[&str] = &["SELECT", "INSERT", "UPDATE", "DELETE"];

/// The journal needs none: its trigger runs with the rights of its owner.
const NEEDED: [Needed; 6] = [
    Needed {
        table: "oncegate_schema",
        rights: &["SELECT", "UPDATE"],
        by: None,
    },
    Needed {
        table: "oncegate_records",
        rights: READ_AND_WRITE,
        by: None,
    },
    // A scope's descriptor is removed only after a trial.
    Needed {
        table: "oncegate_descriptors",
        rights: &["SELECT", "INSERT", "UPDATE"],
        by: None,
    },
    Needed {
        table: "oncegate_sessions",
        rights: READ_AND_WRITE,
        by: Some("a transactional handler"),
    },
    Needed {
        table: "oncegate_outbox",
        rights: READ_AND_WRITE,
        by: Some("an outbox"),
    },
    Needed {
        table: "oncegate_outbox_leaders",
        rights: READ_AND_WRITE,
        by: Some("an outbox"),
    },
];

/// Of pairs of a table and a right, those that this role lacks. Of a table that does not exist,
/// nothing is lacking.
const ASK: &str = "\
SELECT needed.name, needed.privilege FROM unnest($1::text[], $2::text[]) AS needed (name, privilege) \
WHERE NOT has_table_privilege(to_regclass(needed.name), needed.privilege)";

/// The schema of tables that this role cannot see, although it looks for them there.
const ASK_HIDDEN: &str = "\
SELECT n.nspname::text FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace \
WHERE c.relname = 'oncegate_schema' AND to_regclass('oncegate_schema') IS NULL \
AND NOT has_schema_privilege(n.oid, 'USAGE') AND (n.nspname = current_user \
OR n.nspname = ANY(regexp_split_to_array(replace(current_setting('search_path'), '\"', ''), '\\s*,\\s*'))) LIMIT 1";

/// The rights that a role lacks.
#[derive(Debug, Default)]
pub(super) struct Lacking {
    /// The rights that every consumer needs, as a sentence with the statements that grant them.
    pub(super) by_all: Option<String>,
    /// The rights that only some need, a sentence for each table.
    pub(super) by_some: Vec<String>,
}

/// Asks which rights `role`, the one that is connected, lacks.
pub(super) async fn lacking(client: &Object, role: &str) -> Result<Lacking, Trouble> {
    let hidden = client
        .query_opt(ASK_HIDDEN, &[])
        .await
        .map_err(|error| errors::not_executed(&error))?;
    if let Some(row) = hidden {
        let schema = quoted(row.get(0));
        let role = quoted(role);
        let lack = format!(
            "it may not use the schema {schema} of the tables; run as its owner: GRANT USAGE ON SCHEMA {schema} TO {role};"
        );
        return Ok(Lacking {
            by_all: Some(lack),
            ..Lacking::default()
        });
    }
    let pairs = NEEDED
        .iter()
        .flat_map(|needed| needed.rights.iter().map(|right| (needed.table, *right)));
    let (tables, rights): (Vec<&str>, Vec<&str>) = pairs.unzip();
    let rows = client.query(ASK, &[&tables, &rights]).await;
    let rows = rows.map_err(|error| errors::not_executed(&error))?;
    let lacking: Vec<(String, String)> = rows.iter().map(|row| (row.get(0), row.get(1))).collect();
    Ok(told(&lacking, role))
}

/// Says which of these pairs of a table and a right `role` lacks.
fn told(lacking: &[(String, String)], role: &str) -> Lacking {
    let by_all: Vec<String> = NEEDED
        .iter()
        .filter(|needed| needed.by.is_none())
        .filter_map(|needed| {
            let rights = needed.of(lacking)?;
            Some(format!("{rights} on {}", needed.table))
        })
        .collect();
    let by_some = NEEDED.iter().filter_map(|needed| {
        let by = needed.by?;
        let rights = needed.of(lacking)?;
        let table = needed.table;
        let grant = format!("GRANT {rights} ON {table} TO {};", quoted(role));
        Some(format!(
            "This role lacks rights that {by} needs; run as the tables' owner: {grant}"
        ))
    });
    Lacking {
        by_some: by_some.collect(),
        by_all: (!by_all.is_empty()).then(|| {
            let grants = schema::grants(role);
            format!(
                "it lacks {}; run as the tables' owner: {grants}",
                by_all.join(" and ")
            )
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_missing_right_is_named_with_its_grant_statement() {
        let pairs = [
            ("oncegate_descriptors", "UPDATE"),
            ("oncegate_outbox", "INSERT"),
            ("oncegate_outbox", "DELETE"),
            ("oncegate_sessions", "SELECT"),
        ];
        let pairs = pairs.map(|(table, right)| (table.to_owned(), right.to_owned()));
        let Lacking { by_all, by_some } = told(&pairs, "a\"b");
        let by_all = by_all.expect("every consumer needs one");
        assert!(
            by_all.contains("UPDATE on oncegate_descriptors") && !by_all.contains("and"),
            "{by_all}"
        );
        assert!(by_all.contains(&schema::grants("a\"b")), "{by_all}");
        let [sessions, outbox] = by_some.try_into().expect("two tables");
        assert!(
            sessions.ends_with(r#"GRANT SELECT ON oncegate_sessions TO "a""b";"#),
            "{sessions}"
        );
        assert!(
            outbox.ends_with(r#"GRANT INSERT, DELETE ON oncegate_outbox TO "a""b";"#),
            "{outbox}"
        );
    }

    #[test]
    fn the_printed_statements_grant_every_right_that_is_checked() {
        let grants = schema::grants("billing");
        for Needed { table, rights, .. } in NEEDED {
            let granted = grants
                .lines()
                .find(|line| line.contains(table))
                .expect(table);
            assert!(
                rights.iter().all(|right| granted.contains(right)),
                "{table}: {granted}"
            );
        }
    }
}
