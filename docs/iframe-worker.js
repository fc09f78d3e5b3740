// Search runs in a worker, and browsers start no worker for a page that was opened from disk. There, a hidden
// frame takes its place: it loads the same script, and messages go to and fro between the two windows.
class IFrameWorker extends EventTarget {
  constructor(url) {
    super();
    this.onmessage = null;
    this.frame = document.createElement("iframe");
    this.frame.hidden = true;
    document.body.appendChild(this.frame);
    const inside = this.frame.contentWindow;
    this.receive = (event) => {
      if (event.source !== inside) return;
      this.dispatchEvent(new MessageEvent("message", { data: event.data }));
      if (this.onmessage) this.onmessage(event);
    };
    window.addEventListener("message", this.receive);
    this.ready = new Promise((resolve) => {
      window.addEventListener("message", function begun(event) {
        if (event.source !== inside || event.data !== "iframe-worker begun") return;
        window.removeEventListener("message", begun);
        event.stopImmediatePropagation();
        resolve();
      }, { capture: true });
    });
    inside.document.open();
    inside.document.write(`<!doctype html><body><script>
      var postMessage = (data) => parent.postMessage(data, "*");
      var importScripts = (...urls) => urls.reduce((before, url) => before.then(() => new Promise((done) => {
        const script = document.createElement("script");
        script.src = url;
        script.onload = done;
        document.body.appendChild(script);
      })), Promise.resolve());
    <\/script><script src="${url}"><\/script><script>postMessage("iframe-worker begun")<\/script>`);
    inside.document.close();
  }
  postMessage(data) {
    this.ready.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })));
  }
  terminate() {
    window.removeEventListener("message", this.receive);
    this.frame.remove();
  }
}
if (location.protocol === "file:") window.Worker = IFrameWorker;
