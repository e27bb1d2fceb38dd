//! The answers to requests: who may ask, what is read or changed, which page follows.

use std::sync::Arc;

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use axum::response::{Html, IntoResponse, Redirect, Response};
use axum::routing::{get, post};
use maud::Markup;
use tracing::{info, warn};

use super::fields::Fields;
use super::letters::{Search, Snapshot};
use super::pages::{self, LettersPage, Overview};
use super::session::{Session, check_name, cookie_name, is_from_here};
use super::{Change, LetterDetail, LetterPlace, Operate, RedriveOrder};
use crate::Telemetry;
use crate::router::fresh;

/// The largest form, in bytes.
const FORM_MAX_BYTES: usize = 16 * 1024;
/// The longest reason of an action, in bytes.
const WHY_MAX_BYTES: usize = 500;

/// The policy of the pages: they run nothing, load nothing, and send forms only to this server.
const POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; \
                      form-action 'self'; frame-ancestors 'none'";

/// The parts that answer a request.
#[derive(Clone)]
struct Desk {
    telemetry: Telemetry,
    operate: Arc<Operate>,
}

/// The routes of everything that acts.
pub(crate) fn router(telemetry: Telemetry, operate: Arc<Operate>) -> Router<Telemetry> {
    let desk = Desk { telemetry, operate };
    Router::new()
        .route("/operate", get(overview))
        .route("/sign-in", get(show_sign_in).post(sign_in))
        .route("/sign-out", post(sign_out))
        .route("/pause", post(pause))
        .route("/resume", post(resume))
        .route("/letters", get(letters))
        .route("/read-letters", post(read_letters))
        .route("/letter", get(letter))
        .route("/redrive", get(confirm_redrive).post(redrive))
        .route("/stop-redrive", post(stop_redrive))
        .with_state(desk)
}

fn page(code: StatusCode, markup: Markup) -> Response {
    const HEADERS: [(HeaderName, &str); 3] = [
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        // Without an `Origin`, forms would be refused.
        (header::REFERRER_POLICY, "same-origin"),
    ];
    fresh((code, HEADERS, Html(markup.into_string())))
}

fn see(place: &str) -> Response {
    fresh(Redirect::to(place))
}

/// An answer that ends a request early.
struct Refused(Box<Response>);

impl From<Response> for Refused {
    fn from(response: Response) -> Self {
        Self(Box::new(response))
    }
}

impl IntoResponse for Refused {
    fn into_response(self) -> Response {
        *self.0
    }
}

/// The answer of a route.
type Answer = Result<Response, Refused>;

/// An action by a person who may act.
struct Asked {
    session: Session,
    fields: Fields,
}

impl Desk {
    /// Returns the session of a request that only shows something.
    fn session(&self, headers: &HeaderMap) -> Result<Session, Refused> {
        let token = self.operate.token().ok();
        let session = token.and_then(|token| self.operate.sessions.find(headers, token));
        Ok(session.ok_or_else(|| see("sign-in"))?)
    }

    /// Returns the session and the query of a request that only shows something.
    fn shows(&self, request: &Request) -> Result<Asked, Refused> {
        let session = self.session(request.headers())?;
        let query = request.uri().query().unwrap_or_default();
        Ok(Asked {
            session,
            fields: Fields::of(query.as_bytes()),
        })
    }

    /// Returns the session and the fields of a form that this page has given to it.
    async fn asked(&self, request: Request) -> Result<Asked, Refused> {
        let (parts, body) = request.into_parts();
        if !is_from_here(&parts.headers) {
            return Err(forged(parts.uri.path()));
        }
        let session = self.session(&parts.headers)?;
        let fields = form(&parts.headers, body).await?;
        if !session.has_given(fields.get("secret")) {
            return Err(forged(parts.uri.path()));
        }
        Ok(Asked { session, fields })
    }

    fn place(&self, asked: &Asked) -> Result<LetterPlace, Refused> {
        let scope = asked.fields.get("scope");
        let mut places = self.operate.operator.places().into_iter();
        let found = places.find(|place| place.scope == scope);
        found.ok_or_else(|| {
            let text = "No consumer of this process has this scope.";
            notice(
                StatusCode::NOT_FOUND,
                Some(&asked.session),
                "Not found",
                text,
            )
        })
    }

    /// The dead letters of a scope, unless something was done since they were read.
    fn snapshot(&self, scope: &str) -> Option<Arc<Snapshot>> {
        let operate = &self.operate;
        operate.snapshots.current(scope, operate.operator.stamp())
    }
}

/// A page that says why there is no other one.
fn notice(code: StatusCode, session: Option<&Session>, title: &str, text: &str) -> Refused {
    page(code, pages::notice(session, title, text)).into()
}

/// Refuses a form that this page has not given.
fn forged(path: &str) -> Refused {
    const FORGED: &str = "The form was not one of this page, or it is too old: go back, load the page again, and repeat.";
    warn!(path, "a form that is not of this page was refused");
    notice(StatusCode::FORBIDDEN, None, "Refused", FORGED)
}

/// Refuses a sign-in.
fn not_signed_in(why: &str) -> Refused {
    page(StatusCode::FORBIDDEN, pages::sign_in(Some(why))).into()
}

/// Says that nothing was changed, and why.
fn failed(session: &Session, why: &str) -> Refused {
    let title = "Nothing was changed";
    notice(StatusCode::CONFLICT, Some(session), title, why)
}

/// Says that a letter is not there.
fn gone(session: &Session) -> Refused {
    let text = "There is no such dead letter, or something was done since they were read: read them again.";
    notice(StatusCode::NOT_FOUND, Some(session), "Not found", text)
}

/// Reads a form. Forms of other types could come from elsewhere.
async fn form(headers: &HeaderMap, body: Body) -> Result<Fields, Refused> {
    const FORM: &str = "application/x-www-form-urlencoded";
    let kind = headers
        .get(header::CONTENT_TYPE)
        .and_then(|kind| kind.to_str().ok());
    let is_form = kind.is_some_and(|kind| kind.split(';').next() == Some(FORM));
    let bytes = to_bytes(body, FORM_MAX_BYTES).await.ok();
    bytes
        .filter(|_| is_form)
        .map(|bytes| Fields::of(&bytes))
        .ok_or_else(|| {
            let text = "This is not a form of this page.";
            notice(StatusCode::BAD_REQUEST, None, "Refused", text)
        })
}

/// Returns the scope, the person and the reason of an action.
fn change(asked: &Asked) -> Result<Change, Refused> {
    const SAY_WHY: &str = "Say why, on one line of up to 500 bytes: it goes into the journal.";
    let why = asked.fields.get("why");
    let is_said = !why.is_empty() && why.len() <= WHY_MAX_BYTES;
    if !is_said || why.chars().any(char::is_control) {
        return Err(failed(&asked.session, SAY_WHY));
    }
    Ok(Change {
        scope: asked.fields.get("scope").to_owned(),
        by: asked.session.name.clone(),
        why: why.to_owned(),
    })
}

async fn show_sign_in() -> Response {
    page(StatusCode::OK, pages::sign_in(None))
}

async fn sign_in(State(desk): State<Desk>, request: Request) -> Answer {
    let (parts, body) = request.into_parts();
    if !is_from_here(&parts.headers) {
        return Err(not_signed_in("The form was sent by another page."));
    }
    let fields = form(&parts.headers, body).await?;
    let name = fields.get("name");
    check_name(name).map_err(not_signed_in)?;
    let token = desk.operate.token().map_err(|why| {
        warn!(why, "the token of `status.operate` cannot be read");
        not_signed_in("The token of this page cannot be read: the log of the process says why.")
    })?;
    if blake3::hash(fields.get("token").as_bytes()) != token {
        warn!(
            name,
            "a sign-in to the status page with a wrong token was refused"
        );
        return Err(not_signed_in("The token is wrong."));
    }
    info!(name, "a person has signed in to the status page");
    let cookie = format!(
        "{}={}; Path=/; HttpOnly; SameSite=Strict; Max-Age=43200",
        cookie_name(&parts.headers),
        desk.operate.sessions.begin(name, token)
    );
    let mut response = see("operate");
    let value = HeaderValue::from_str(&cookie).expect("names and hashes are ASCII");
    response.headers_mut().insert(header::SET_COOKIE, value);
    Ok(response)
}

async fn sign_out(State(desk): State<Desk>, request: Request) -> Answer {
    let asked = desk.asked(request).await?;
    desk.operate.sessions.end(&asked.session);
    Ok(see("sign-in"))
}

async fn overview(State(desk): State<Desk>, request: Request) -> Answer {
    let asked = desk.shows(&request)?;
    let statuses = desk.telemetry.statuses();
    let mut scopes: Vec<_> = statuses
        .iter()
        .flat_map(|status| &status.scopes)
        .map(|scope| (scope.scope.clone(), scope.pause.clone()))
        .collect();
    scopes.dedup_by(|one, other| one.0 == other.0);
    let operator = &desk.operate.operator;
    let markup = pages::overview(&Overview {
        session: &asked.session,
        statuses: &statuses,
        places: &operator.places(),
        redrives: &operator.redrives(),
        scopes: &scopes,
    });
    Ok(page(StatusCode::OK, markup))
}

async fn pause(State(desk): State<Desk>, request: Request) -> Answer {
    let asked = desk.asked(request).await?;
    let paused = desk.operate.operator.pause(change(&asked)?).await;
    paused.map_err(|why| failed(&asked.session, &why))?;
    Ok(see("operate"))
}

async fn resume(State(desk): State<Desk>, request: Request) -> Answer {
    let asked = desk.asked(request).await?;
    let resumed = desk.operate.operator.resume(change(&asked)?).await;
    resumed.map_err(|why| failed(&asked.session, &why))?;
    Ok(see("operate"))
}

async fn letters(State(desk): State<Desk>, request: Request) -> Answer {
    let asked = desk.shows(&request)?;
    let place = desk.place(&asked)?;
    let snapshot = desk.snapshot(&place.scope);
    let mut redrives = desk.operate.operator.redrives();
    redrives.retain(|redrive| redrive.scope == place.scope);
    let markup = pages::letters(&LettersPage {
        session: &asked.session,
        place: &place,
        search: &Search::of(&asked.fields),
        snapshot: snapshot.as_deref(),
        redrives: &redrives,
        page: asked.fields.get("page").parse().unwrap_or_default(),
    });
    Ok(page(StatusCode::OK, markup))
}

async fn read_letters(State(desk): State<Desk>, request: Request) -> Answer {
    let asked = desk.asked(request).await?;
    let LetterPlace { scope, .. } = desk.place(&asked)?;
    let operator = &desk.operate.operator;
    // Before they are read: a redrive that begins meanwhile makes them old.
    let stamp = operator.stamp();
    let read = operator.read(&scope).await;
    let read = read.map_err(|why| failed(&asked.session, &why))?;
    desk.operate.snapshots.keep(&scope, stamp, read);
    Ok(see_letters(&scope))
}

/// Leads to the open dead letters of a scope.
fn see_letters(scope: &str) -> Response {
    see(&format!("letters?{}", Search::default().query(scope)))
}

async fn letter(State(desk): State<Desk>, request: Request) -> Answer {
    let asked = desk.shows(&request)?;
    let session = &asked.session;
    let place = desk.place(&asked)?;
    let at = asked.fields.get("at");
    let snapshot = desk.snapshot(&place.scope);
    let known = snapshot
        .as_deref()
        .and_then(|snapshot| snapshot.read.letters.iter().find(|one| one.at == at))
        .ok_or_else(|| gone(session))?;
    // A link must not use up a receive of a queue.
    let is_whole = place.cost.is_none();
    let detail = if is_whole {
        let read = desk.operate.operator.show(&place.scope, at).await;
        read.map_err(|why| failed(session, &why))?
            .ok_or_else(|| gone(session))?
    } else {
        LetterDetail {
            letter: known.clone(),
            ..LetterDetail::default()
        }
    };
    let markup = pages::letter(session, &place.scope, &detail, is_whole);
    Ok(page(StatusCode::OK, markup))
}

/// The text when what was counted is not what is there.
const COUNT_AGAIN: &str = "The dead letters were not read, or not lately, or something was done since: read and count them \
                           again.";

async fn confirm_redrive(State(desk): State<Desk>, request: Request) -> Answer {
    let asked = desk.shows(&request)?;
    let place = desk.place(&asked)?;
    let snapshot = desk.snapshot(&place.scope);
    let snapshot = snapshot.ok_or_else(|| failed(&asked.session, COUNT_AGAIN))?;
    let search = Search::of(&asked.fields);
    let markup = pages::confirm(&asked.session, &place, &search, &snapshot);
    Ok(page(StatusCode::OK, markup))
}

async fn redrive(State(desk): State<Desk>, request: Request) -> Answer {
    let asked = desk.asked(request).await?;
    let session = &asked.session;
    let change = change(&asked)?;
    let rate = rate(&asked)?;
    let LetterPlace { scope, .. } = desk.place(&asked)?;
    let operator = &desk.operate.operator;
    let id = asked.fields.get("snapshot");
    let snapshots = &desk.operate.snapshots;
    let counted = snapshots.counted(&scope, operator.stamp(), id);
    let counted = counted.ok_or_else(|| failed(session, COUNT_AGAIN))?;
    let places = Search::of(&asked.fields).places(&counted.read.letters);
    if places.is_empty() {
        return Err(failed(session, "There is nothing to redrive."));
    }
    let order = RedriveOrder {
        change,
        places,
        rate,
    };
    let begun = operator.redrive(order).await;
    begun.map_err(|why| failed(session, &why))?;
    Ok(see_letters(&scope))
}

/// Returns the most messages a second; `None` for no limit.
fn rate(asked: &Asked) -> Result<Option<u32>, Refused> {
    const WRONG: &str = "The rate must be a whole number above 0, or empty.";
    let given = asked.fields.get("rate");
    if given.is_empty() {
        return Ok(None);
    }
    let rate = given.parse().ok().filter(|rate| *rate > 0);
    rate.map(Some).ok_or_else(|| failed(&asked.session, WRONG))
}

async fn stop_redrive(State(desk): State<Desk>, request: Request) -> Answer {
    let asked = desk.asked(request).await?;
    let scope = asked.fields.get("scope");
    desk.operate.operator.stop_redrive(scope);
    Ok(see("operate"))
}
