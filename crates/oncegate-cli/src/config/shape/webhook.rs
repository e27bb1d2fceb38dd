//! The providers of webhooks, each with what it signs by.

use oncegate_serve::webhook::{
    HmacSettings, PlainSettings, Preset, StripeSettings, TimedSettings, TwilioSettings,
    UnsignedSettings,
};
use schemars::JsonSchema;
use serde::Deserialize;

/// The provider of a webhook; one of these.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct Webhook {
    /// Standard Webhooks, and Svix: by `whsec_…` or `whpk_…`.
    pub(crate) standard: Option<TimedSettings>,
    /// Stripe: by the signing secret of the endpoint.
    pub(crate) stripe: Option<StripeSettings>,
    /// GitHub: by the secret of the webhook.
    pub(crate) github: Option<PlainSettings>,
    /// Shopify: by the client secret of the app.
    pub(crate) shopify: Option<PlainSettings>,
    /// Slack's Events API: by the signing secret of the app.
    pub(crate) slack: Option<TimedSettings>,
    /// Twilio: by the auth token of the account.
    pub(crate) twilio: Option<TwilioSettings>,
    /// Any other provider that signs the body by an HMAC.
    pub(crate) hmac: Option<HmacSettings>,
    /// No signature: everything that can reach the address can send events.
    pub(crate) none: Option<UnsignedSettings>,
}

impl Webhook {
    /// Returns the preset that is given; several or none is an error in words.
    pub(crate) fn preset(&self) -> Result<Preset, String> {
        let given = self.clone();
        let presets: Vec<Preset> = [
            given.standard.map(Preset::Standard),
            given.stripe.map(Preset::Stripe),
            given.github.map(Preset::Github),
            given.shopify.map(Preset::Shopify),
            given.slack.map(Preset::Slack),
            given.twilio.map(Preset::Twilio),
            given.hmac.map(Preset::Hmac),
            given.none.map(Preset::None),
        ]
        .into_iter()
        .flatten()
        .collect();
        match presets.as_slice() {
            [preset] => Ok(preset.clone()),
            [] => Err(
                "it names no provider; give one of standard, stripe, github, shopify, slack, twilio, hmac and none"
                    .to_owned(),
            ),
            several => {
                let names: Vec<&str> = several.iter().map(Preset::name).collect();
                Err(format!("it names {}; make a door for each", names.join(" and ")))
            }
        }
    }
}
