//! The tables of an outbox.

/// The condition that a row is a message, with the limits of `OutboxMessage::check`. `CASE`: the
/// functions of the last part refuse arrays of several dimensions.
macro_rules! is_message {
    () => {
        "outbox ~ '^[A-Za-z0-9._-]{1,64}$' AND octet_length(id) BETWEEN 1 AND 128 \
         AND octet_length(topic) BETWEEN 1 AND 512 AND coalesce(octet_length(payload), 0) <= 67108864 \
         AND cardinality(header_names) = cardinality(header_values) AND cardinality(header_names) <= 128 \
         AND CASE WHEN coalesce(array_ndims(header_names), 1) > 1 OR coalesce(array_ndims(header_values), 1) > 1 THEN false \
         ELSE array_position(header_names, NULL) IS NULL AND array_position(header_names, 'outbox-id') IS NULL END"
    };
}

/// The condition that a row is a message.
pub(crate) const IS_MESSAGE: &str = is_message!();

/// The tables. The statements can be repeated.
///
/// The first index holds what is not sent, so that it stays small; the second one serves the purge.
pub(crate) const TABLES: &str = concat!(
    "\
CREATE TABLE IF NOT EXISTS oncegate_outbox (
    sequence      bigint  GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    outbox        text COLLATE \"C\" NOT NULL,      -- the name of the outbox
    id            text    NOT NULL DEFAULT gen_random_uuid()::text, -- the header outbox-id: unique
    topic         text    NOT NULL,
    key           bytea,
    payload       bytea,                           -- NULL: a tombstone
    header_names  text[]  NOT NULL DEFAULT '{}',
    header_values bytea[] NOT NULL DEFAULT '{}',     -- as many as names
    written_at_ms bigint  NOT NULL DEFAULT floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint,
    sent_at_ms    bigint,                          -- since 1970; NULL: not sent yet
    CONSTRAINT oncegate_outbox_message CHECK (",
    is_message!(),
    ")
) WITH (autovacuum_vacuum_scale_factor = 0.1);

CREATE INDEX IF NOT EXISTS oncegate_outbox_unsent ON oncegate_outbox (outbox, sequence) WHERE sent_at_ms IS NULL;
CREATE INDEX IF NOT EXISTS oncegate_outbox_sent ON oncegate_outbox (outbox, sent_at_ms) WHERE sent_at_ms IS NOT NULL;

CREATE TABLE IF NOT EXISTS oncegate_outbox_leaders (
    outbox      text COLLATE \"C\" NOT NULL PRIMARY KEY,
    relay       bytea  NOT NULL,
    leads_until_ms bigint NOT NULL,                -- since 1970
    lease_ms    bigint NOT NULL                    -- of the relay
);
"
);

/// The statement that brings a table of an earlier release up to date. Rows that are there are not
/// checked, so it takes no time.
pub(crate) const CONTRACT: &str = concat!(
    "\
ALTER TABLE oncegate_outbox
    ALTER COLUMN id SET DEFAULT gen_random_uuid()::text,
    ALTER COLUMN header_names SET DEFAULT '{}',
    ALTER COLUMN header_values SET DEFAULT '{}',
    ADD CONSTRAINT oncegate_outbox_message CHECK (",
    is_message!(),
    ") NOT VALID;
"
);
