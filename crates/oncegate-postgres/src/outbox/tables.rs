//! The tables of an outbox.

/// The tables. The statements can be repeated.
///
/// The first index holds what is not sent, so that it stays small; the second one serves the purge.
pub(crate) const TABLES: &str = "\
CREATE TABLE IF NOT EXISTS oncegate_outbox (
    sequence      bigint  GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    outbox        text COLLATE \"C\" NOT NULL,      -- the name of the outbox
    id            text    NOT NULL,                -- the header outbox-id
    topic         text    NOT NULL,
    key           bytea,
    payload       bytea,                           -- NULL: a tombstone
    header_names  text[]  NOT NULL,
    header_values bytea[] NOT NULL,
    written_at_ms bigint  NOT NULL DEFAULT floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint,
    sent_at_ms    bigint                           -- since 1970; NULL: not sent yet
) WITH (autovacuum_vacuum_scale_factor = 0.1);

CREATE INDEX IF NOT EXISTS oncegate_outbox_unsent ON oncegate_outbox (outbox, sequence) WHERE sent_at_ms IS NULL;
CREATE INDEX IF NOT EXISTS oncegate_outbox_sent ON oncegate_outbox (outbox, sent_at_ms) WHERE sent_at_ms IS NOT NULL;

CREATE TABLE IF NOT EXISTS oncegate_outbox_leaders (
    outbox      text COLLATE \"C\" NOT NULL PRIMARY KEY,
    relay       bytea  NOT NULL,
    leads_until_ms bigint NOT NULL,                -- since 1970
    lease_ms    bigint NOT NULL                    -- of the relay
);
";
