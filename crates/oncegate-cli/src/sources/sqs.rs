//! A queue of SQS.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use oncegate::admin::dead_letter_reader::DeadLetterReader;
use oncegate::dead_letters;
use oncegate::source::{Source, SourceError, Terms};
use oncegate::sqs::{Body, SqsDeadLetterReader, SqsDeadLetters, SqsSettings, SqsSource};
use schemars::JsonSchema;
use serde::Deserialize;

use super::{
    ConfiguredSource, DeadLetters, LetterPlace, LetterQueue, QueueFlags, SourceFinding,
    SourceSettings, Template, next, quoted,
};
use crate::config::values::{Names, Size};
use crate::exit::{Exit, Problem, not_opened};

/// The name of the table.
pub(super) const TABLE: &str = "sqs";
/// The longest time for which SQS lets a message stay in flight.
const HOLDS_MOST: Duration = Duration::from_secs(12 * 3_600);

/// A message that a killed look into a queue has received is hidden for this long.
const LOOK_VISIBILITY: Duration = Duration::from_secs(60);
/// The longest time that a receive of such a look waits for messages.
const LOOK_WAIT: Duration = Duration::from_secs(2);

/// What `init` has to know of SQS.
#[derive(Debug, clap::Args)]
pub(super) struct InitSqs {
    /// The address of another SQS server
    #[arg(long, value_name = "URL")]
    endpoint_url: Option<String>,
}

impl InitSqs {
    /// Returns what `init` writes.
    pub(super) fn template(&self, queues: &QueueFlags) -> Template {
        let endpoint = self.endpoint_url.as_deref();
        let endpoint = endpoint
            .map(|url| format!(", endpoint_url = {}", quoted(url)))
            .unwrap_or_default();
        Template {
            source: format!(
                "{{ sqs = {{ queue = {}{endpoint} }} }}",
                quoted(&queues.queue)
            ),
            dead_letters: format!("{{ sqs = {} }}", quoted(&queues.dead_letter_queue)),
            about: "Credentials and region come in the AWS SDK's usual ways.",
            store: "redis://localhost:6379",
            next: [next::CHECK, next::DOCTOR, next::RUN]
                .map(str::to_owned)
                .into(),
        }
    }
}

/// The server of a queue of SQS that is looked into.
#[derive(Debug, clap::Args)]
pub(super) struct SqsFlags {
    /// The address of another SQS server: http://127.0.0.1:9324 [default: as the AWS SDK finds it]
    #[arg(long, value_name = "URL", requires = "queue")]
    endpoint_url: Option<String>,

    /// Bodies are envelopes of SNS
    #[arg(long, requires = "queue")]
    sns: bool,
}

impl SqsFlags {
    pub(super) fn are_given(&self) -> bool {
        self.endpoint_url.is_some() || self.sns
    }

    pub(super) fn source(&self, queue: &str, configured: Option<&Sqs>) -> Box<dyn Source> {
        let mut settings = configured.cloned().unwrap_or_default();
        settings.queue = Some(queue.to_owned());
        settings.endpoint_url = self.endpoint_url.clone().or(settings.endpoint_url);
        if self.sns {
            settings.settings.body = Body::Sns;
        }
        // A dead letter keeps its first route.
        let source = settings.source().routes_from_attributes();
        Box::new(source.visibility(LOOK_VISIBILITY).wait(LOOK_WAIT))
    }
}

/// An SQS queue. Credentials come in the AWS SDK's usual ways.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct Sqs {
    /// The queue's name or URL.
    pub(crate) queue: Option<String>,
    /// The region.
    #[schemars(extend("default" = "the AWS SDK's, or the URL's"))]
    pub(crate) region: Option<String>,
    /// The address of another SQS server.
    pub(crate) endpoint_url: Option<String>,
    /// Large payloads, which Amazon's extended clients for SQS and SNS have put into S3.
    pub(crate) s3_payloads: Option<S3Payloads>,
    #[serde(default, rename = "*settings")]
    #[schemars(flatten)]
    pub(crate) settings: SqsSettings,
}

/// The objects in S3 that messages point to. They are read with the login of the queue, and never
/// deleted. Needs a build with the feature `s3`.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[cfg_attr(
    not(feature = "s3"),
    expect(
        dead_code,
        reason = "a build without S3 refuses the setting, and reads it before"
    )
)]
pub(crate) struct S3Payloads {
    /// The buckets that may be read from; a pointer to another one is bad input.
    pub(crate) buckets: Names,
    /// The largest payload; a larger one is bad input.
    #[schemars(extend("default" = "4MiB"))]
    pub(crate) max_size: Option<Size>,
    /// The address of another server with S3's protocol.
    #[schemars(extend("default" = "the AWS SDK's, or the region's"))]
    pub(crate) endpoint_url: Option<String>,
}

#[cfg(feature = "s3")]
impl S3Payloads {
    fn payloads(&self) -> oncegate::sqs::S3Payloads {
        let mut payloads = oncegate::sqs::S3Payloads::new(&self.buckets.0);
        if let Some(Size(bytes)) = self.max_size {
            payloads = payloads.max_bytes(bytes);
        }
        if let Some(url) = &self.endpoint_url {
            payloads = payloads.endpoint_url(url);
        }
        payloads
    }
}

impl Sqs {
    /// Returns the source.
    pub(crate) fn source(&self) -> SqsSource {
        let mut source =
            SqsSource::new(self.queue.clone().unwrap_or_default()).settings(self.settings);
        if let Some(region) = &self.region {
            source = source.region(region);
        }
        if let Some(url) = &self.endpoint_url {
            source = source.endpoint_url(url);
        }
        #[cfg(feature = "s3")]
        if let Some(payloads) = &self.s3_payloads {
            source = source.s3_payloads(payloads.payloads());
        }
        source
    }
}

/// The name of a queue, of its name or URL.
fn name_of(queue: &str) -> &str {
    queue
        .trim_end_matches('/')
        .rsplit('/')
        .next()
        .unwrap_or_default()
}

impl SourceSettings for Sqs {
    fn table(&self) -> &'static str {
        TABLE
    }

    fn findings(&self) -> Vec<SourceFinding<'_>> {
        let is_missing = self.queue.as_deref().is_none_or(str::is_empty);
        let missing =
            is_missing.then_some(SourceFinding::Missing("queue", "the queue's name or URL"));
        let s3 =
            (self.s3_payloads.is_some() && !cfg!(feature = "s3")).then_some(SourceFinding::Error(
                "s3_payloads",
                "this build does not read from S3: install it with `--features s3`",
            ));
        let wrong = self.settings.check().into_iter().map(SourceFinding::Wrong);
        missing.into_iter().chain(s3).chain(wrong).collect()
    }

    fn findings_beside(&self, lease: Duration, max_run: Duration) -> Vec<SourceFinding<'_>> {
        let mut findings = Vec::new();
        let visibility = self.settings.visibility;
        if visibility < lease {
            let message = format!(
                "{visibility:?} is shorter than the lease ({lease:?}): after a crash a message comes again before its lease is \
                 over, and waits; set it to {lease:?} or more"
            );
            findings.push(SourceFinding::Warning("visibility", message));
        }
        if max_run > HOLDS_MOST {
            findings.push(SourceFinding::ConsumerWarning(
                "max_run",
                "SQS takes a message back 12 hours after its receive, whatever runs: a longer run is cancelled then, and its \
                 message comes again; set it to 12h or less",
            ));
        }
        findings
    }

    fn refuse_letters(&self, letters: &DeadLetters) -> Option<(&'static str, String)> {
        if let Some(refused) = letters.refused_for(TABLE) {
            return Some(refused);
        }
        let queue = letters.sqs.as_ref()?;
        (self.queue.as_deref().map(name_of) == Some(name_of(queue))).then(|| {
            (
                "sqs",
                format!("the queue {queue} is consumed: every letter would come back"),
            )
        })
    }

    fn queue(&self) -> Option<&str> {
        self.queue.as_deref().map(name_of)
    }

    fn routes(&self) -> Vec<String> {
        self.queue
            .as_deref()
            .map(|queue| name_of(queue).to_owned())
            .into_iter()
            .collect()
    }

    fn is_complete(&self) -> bool {
        true
    }

    fn open(&self, _: &str, _: Duration) -> Result<Box<dyn ConfiguredSource>, String> {
        Ok(Box::new(self.source()))
    }

    fn open_without_secrets(&self, _: &str) -> Result<Box<dyn ConfiguredSource>, String> {
        Ok(Box::new(self.source()))
    }
}

#[async_trait]
impl ConfiguredSource for SqsSource {
    fn check(&self) -> Result<(), String> {
        Self::check(self).map_err(|error| error.to_string())
    }

    async fn examine(&self, terms: &Terms) -> Result<Vec<String>, SourceError> {
        self.check_queue(terms).await
    }

    fn dead_letters(&self, to: &DeadLetters) -> Option<Arc<dyn dead_letters::DeadLetters>> {
        Some(Arc::new(Self::dead_letters(self, to.sqs.clone()?)))
    }

    fn letter_queue(&self, to: &DeadLetters) -> Option<Box<dyn LetterQueue>> {
        Some(Box::new(Self::dead_letters(self, to.sqs.clone()?)))
    }

    fn into_source(self: Box<Self>) -> Arc<dyn Source> {
        Arc::from(self as Box<dyn Source>)
    }
}

/// Returns the queue of dead letters of another source, with the login of the machine.
pub(crate) fn letter_queue(to: &DeadLetters) -> Option<Box<dyn LetterQueue>> {
    Some(Box::new(SqsDeadLetters::new(to.sqs.clone()?)))
}

#[async_trait]
impl LetterQueue for SqsDeadLetters {
    fn name(&self) -> &str {
        self.queue()
    }

    async fn examine(&self) -> Result<Vec<String>, SourceError> {
        self.check_queue().await
    }
}

/// A queue of dead letters.
#[derive(Debug)]
pub(crate) struct SqsLetters {
    pub(crate) queue: String,
    pub(crate) region: Option<String>,
    pub(crate) endpoint_url: Option<String>,
    /// Receives may be used up.
    pub(crate) may_receive: bool,
}

#[async_trait]
impl LetterPlace for SqsLetters {
    fn name(&self) -> &str {
        &self.queue
    }

    fn is_position(&self, text: &str) -> bool {
        text.split_once('#')
            .is_some_and(|(queue, id)| !queue.is_empty() && !id.is_empty())
    }

    fn position_example(&self) -> String {
        "orders-dead#ID".to_owned()
    }

    fn unreadable(&self) -> Option<&'static str> {
        self.queue.ends_with(".fifo").then_some(
            "--queue: a FIFO queue shows nothing behind the first messages of a group as long as those are held, so most of \
             it would not be seen; it can be redriven",
        )
    }

    fn cost(&self) -> Option<&'static str> {
        Some("It uses up one receive of each message, and hides the messages meanwhile.")
    }

    async fn open(&self, _: Option<String>) -> Result<Box<dyn DeadLetterReader>, Problem> {
        if !self.may_receive {
            let text = "looking into a queue uses up one receive of each message, which counts for the redrive policy of \
                        the queue, and hides the messages meanwhile: say --use-up-a-receive if that may be";
            return Err(Problem::new(Exit::Usage, text));
        }
        let mut letters = SqsDeadLetterReader::new(self.queue.as_str());
        if let Some(region) = &self.region {
            letters = letters.region(region);
        }
        if let Some(url) = &self.endpoint_url {
            letters = letters.endpoint_url(url);
        }
        letters.open().await.map_err(|error| not_opened(&error))?;
        Ok(Box::new(letters))
    }
}
